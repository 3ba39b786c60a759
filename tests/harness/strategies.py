"""The one place in which the tests make a strategy."""

from __future__ import annotations

import functools

import tensorflow as tf

from tests.harness.setups import Setup


def configure_devices(setup: Setup, flavor: str) -> None:
    """Splits the CPU into logical devices, before TensorFlow initialises."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if not setup.distributed:
        # Grappler may take away what orders an update of plain Keras after a read of
        # the same step (docs/reports/exactness.md), and costs a fifth of a reference.
        options = {"disable_meta_optimizer": True}
        tf.config.optimizer.set_experimental_options(options)
    if setup.devices_per_worker == 1 or not setup.distributed:
        return
    # A cluster of TF_CONFIG says it there.
    if flavor == "tfdp" and (setup.is_mpi or not setup.is_multi_worker):
        import tfdp.testing

        tfdp.testing.logical_cpus(setup.devices_per_worker)
    elif flavor == "stock":
        cpu = tf.config.list_physical_devices("CPU")[0]
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(
            cpu, [one] * setup.devices_per_worker
        )


def make_strategy(setup: Setup, flavor: str) -> tf.distribute.Strategy | None:
    """Returns the strategy of a set-up, or `None` for the reference.

    Args:
        setup: The set-up.
        flavor: `"tfdp"`, or `"stock"` to see what TensorFlow's own do.
    """
    if not setup.distributed:
        return None
    import tfdp

    module = tf.distribute if flavor == "stock" else tfdp
    if setup.is_tcp:
        return _strategy_over_tcp(setup)
    if setup.backend != "auto":
        communication = tfdp.CommunicationOptions(backend=setup.backend)
        return tfdp.MultiWorkerMirroredStrategy(communication=communication)
    if setup.is_multi_worker:
        strategy = module.MultiWorkerMirroredStrategy()
        if setup.is_mpi:
            assert strategy.extended.group.transport.name == "mpi"
        return strategy
    return module.MirroredStrategy(cpu_devices(setup))


def _strategy_over_tcp(setup: Setup) -> tf.distribute.Strategy:
    """Returns a strategy whose workers share a host, and nothing of it but TCP."""
    import tfdp
    from tfdp.communication.transport import Mesh, listening_address
    from tfdp.training.strategy import transports

    over_tcp = functools.partial(Mesh, use_unix=False)
    transports.Mesh = over_tcp  # type: ignore[assignment, misc]
    communication = tfdp.CommunicationOptions(interface=setup.interface)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=communication)
    assert strategy.extended.group.transport.name == "direct"
    for mesh in transports._meshes.values():
        assert not mesh.share_host(range(setup.num_workers))
        address = listening_address(setup.host, setup.interface)
        assert mesh.addresses.ip == address
    return strategy


def cpu_devices(setup: Setup) -> list[str]:
    """Names of the logical CPUs of a worker of this set-up."""
    return [f"/cpu:{index}" for index in range(setup.devices_per_worker)]
