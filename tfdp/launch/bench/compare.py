"""`tfdp bench compare`: Keras `fit` with tfdp, plain Keras, and loops of others."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdp.ground.onednn import is_disabled_by_default
from tfdp.ground.text import pluralize
from tfdp.launch.bench import output
from tfdp.launch.bench.compare_sides import (
    DEFAULTS,
    DEVICES,
    TUNED,
    WORKERS,
    SetUp,
    set_ups,
)
from tfdp.launch.bench.machine import HOW_TO_GET_TORCH, num_cores, torch_version
from tfdp.launch.bench.models import ModelSettings
from tfdp.launch.bench.sides import Ratio, alternate_for, paired_ratio, started

if TYPE_CHECKING:  # matplotlib is an optional dependency
    from matplotlib.axes import Axes

# Blocks are short, so a change of the machine's load affects all set-ups alike. A block
# of the slowest one takes this many seconds; blocks of the others have the same number
# of steps.
_BLOCK_SECONDS = 0.4
# The table has a column of ratios for each kind of set-up that runs tfdp, with its name
# in the heading.
OURS = {DEVICES: "devices", WORKERS: "processes"}
# Ratios are paired block by block, so the seconds per step of each block are kept, by
# the key `side/variant`.
Times = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Settings(ModelSettings):
    """Settings of `tfdp bench compare`.

    Args:
        num_workers: Int, replicas of a set-up: processes, or devices of one process.
        family: String from `tfdp.launch.bench.models.FAMILIES`.
        millions: Sequence of floats, sizes of the models in million parameters.
        batch_size: Int, number of samples of each replica.
        blocks: Int, number of times that each variant is timed, at least 2.
        torch_python: String, an interpreter that may have PyTorch.
    """

    num_workers: int
    family: str
    millions: Sequence[float]
    batch_size: int
    blocks: int
    torch_python: str

    @property
    def num_threads(self) -> int:
        """Int, threads of a replica: its equal share of the cores, as by `tfdp run`."""
        return max(1, num_cores() // self.num_workers)


def run(settings: Settings, files: output.Files) -> None:
    """Time the steps of all set-ups, print the table, and write the files of results.

    Args:
        settings: `Settings` of the run.
        files: `Files` to write.

    Raises:
        ValueError: If the settings cannot be run.
        RuntimeError: If a worker fails.
    """
    content = output.about("compare", dataclasses.asdict(settings))
    content["models"] = {name: str(model) for name, model in settings.models.items()}
    content["torch"] = torch_version(settings.torch_python)
    has_torch = content["torch"] is not None
    if not has_torch:
        output.new_console().print(
            f"DDP is not measured, since {settings.torch_python} has no PyTorch: "
            f"{HOW_TO_GET_TORCH}.",
            soft_wrap=True,
        )
    measured = set_ups(settings.num_workers, has_torch=has_torch)
    num_variants = sum(len(set_up.variants) for set_up in measured)
    num_blocks = len(settings.models) * settings.blocks * num_variants
    times: Times = {}
    with output.progress_bar("training steps", num_blocks) as on_block:
        # Defaults are compared with defaults only, and tuned with tuned, so that only
        # half of the processes need to exist at a time.
        for tuning in (DEFAULTS, TUNED):
            group = [set_up for set_up in measured if set_up.tuning == tuning]
            times |= _measure(settings, group, on_block)
    content["seconds_per_step"] = times
    global_batch_size = settings.batch_size * settings.num_workers
    rows = [
        row
        for model in settings.models
        for row in rows_of(model, measured, times, global_batch_size)
    ]
    output.report(
        content,
        files,
        rows,
        COLUMNS,
        functools.partial(plot, _title(settings)),
        notes=[*content["models"].values(), *_notes(settings, has_torch=has_torch)],
    )


def _measure(
    settings: Settings, group: Sequence[SetUp], on_block: Callable[[], Any]
) -> Times:
    """Time steps of a group of set-ups, whose processes exist at the same time.

    Args:
        settings: `Settings` of the run.
        group: Sequence of `SetUp`, whose blocks of steps alternate.
        on_block: Callable, called after each block.

    Returns:
        Dict from `side/variant` to seconds per step, block by block.
    """
    sides = {
        set_up: set_up.side(
            settings.models,
            settings.batch_size,
            settings.num_threads,
            settings.torch_python,
        )
        for set_up in group
    }
    times: Times = {}
    with started(*sides.values()):
        for model in settings.models:
            variants = [
                (side, f"{model}{variant}")
                for set_up, side in sides.items()
                for variant in set_up.variants
            ]
            times |= alternate_for(
                _BLOCK_SECONDS, variants, blocks=settings.blocks, on_block=on_block
            )
    return times


def _title(settings: Settings) -> str:
    """Return the title of the plot: what is measured, with the family of models."""
    return (
        f"Training step of {pluralize(settings.num_workers, 'replica')} on one "
        f"machine, {settings.family}, batch {settings.batch_size} each"
    )


def _notes(settings: Settings, *, has_torch: bool) -> list[str]:
    """Return the notes below the table: what was measured, and what was tuned.

    Args:
        settings: `Settings` of the run.
        has_torch: Bool, whether to name what was tuned for DDP.
    """
    threads = pluralize(settings.num_threads, "thread")
    notes = [
        f"A step with SGD, {pluralize(settings.batch_size, 'sample')} for each of "
        f"{pluralize(settings.num_workers, 'replica')} of {threads}; plain Keras has "
        f"all of them in one batch and {pluralize(num_cores(), 'core')}. "
        f"{pluralize(settings.blocks, 'alternating block')}.",
        "tfdp and plain Keras run fit; stock, which cannot, and DDP run a loop on a "
        "fixed batch, with no input pipeline and no metrics.",
        "Own step: without communication, in all processes at once; that of devices "
        "is that of processes. Communication: what it adds to a step.",
        "Speed: of defaults relative to defaults and of tuned relative to tuned; the "
        "tuned choice is made in every other block and compared in the rest.",
        "Tuned: MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ of 1 GiB for all; "
        "fit also with jit_compile=True or steps_per_execution=8; stock's pack size"
        + ("; DDP's gradient_as_bucket_view, SGD with foreach." if has_torch else "."),
    ]
    if is_disabled_by_default():
        notes.append(
            "oneDNN: on with tfdp, which turns it on, and for all that is tuned; off "
            "with the defaults of plain Keras and stock, as TensorFlow leaves it here."
        )
    return notes


@dataclasses.dataclass(frozen=True)
class Row:
    """Results of one set-up for one model: a row of the printed table.

    Args:
        set_up: String, name of the set-up.
        settings: String, `"defaults"`, or `"tuned"` with the chosen variant.
        model: String, name of the model.
        step_seconds: Float, median duration of a step.
        own_step_seconds: Float, median duration of a step without communication, or
            `None` for plain Keras, which does not communicate.
        communication_seconds: Float, median time that communication adds to a step of
            the same block, or `None` for plain Keras.
        samples_per_second: Float, throughput of all replicas together.
        speed_of_tfdp: Dict from `DEVICES` and `WORKERS`, except the row's own kind, to
            the `Ratio` of this step time to that of tfdp, with the same tuning.
    """

    set_up: str
    settings: str
    model: str
    step_seconds: float
    own_step_seconds: float | None
    communication_seconds: float | None
    samples_per_second: float
    speed_of_tfdp: dict[str, Ratio]


def rows_of(
    model: str, set_ups: Sequence[SetUp], times: Times, global_batch_size: int
) -> list[Row]:
    """Return the rows of the table for one model, one for each set-up.

    The fastest tuned variant is chosen by every other block and compared by the
    remaining blocks: the best of several noisy medians would look faster than it is.

    Args:
        model: String, name of the model.
        set_ups: Sequence of `SetUp`, the measured set-ups.
        times: Dict from `side/variant` to seconds per step, block by block.
        global_batch_size: Int, number of samples of a step.

    Returns:
        List of `Row`, in the order of `set_ups`.
    """
    chosen = {set_up: _fastest(model, set_up, times) for set_up in set_ups}
    parts = {
        set_up: _compared(set_up, times[set_up.key(model, choice)])
        for set_up, choice in chosen.items()
    }
    rows = []
    for set_up, steps in parts.items():
        key_without_communication = set_up.key_without_communication(
            model, chosen[set_up]
        )
        alone = (
            _compared(set_up, times[key_without_communication])
            if key_without_communication
            else None
        )
        median = statistics.median(steps)
        rows.append(
            Row(
                set_up.name,
                ": ".join(filter(None, (set_up.tuning, chosen[set_up]))),
                model,
                median,
                statistics.median(alone) if alone else None,
                statistics.median(a - b for a, b in zip(steps, alone, strict=True))
                if alone
                else None,
                global_batch_size / median,
                {
                    ours.kind: paired_ratio(steps, of_ours)
                    for ours, of_ours in parts.items()
                    if ours.kind in OURS
                    and ours.kind != set_up.kind
                    and ours.tuning == set_up.tuning
                },
            )
        )
    return rows


def _fastest(model: str, set_up: SetUp, times: Times) -> str:
    """Return the name of the fastest variant of a set-up, by every other block.

    It has the least median of seconds per step over the first, third, ... block.

    Args:
        model: String, name of the model.
        set_up: `SetUp` whose variants were measured.
        times: Dict from `side/variant` to seconds per step, block by block.
    """
    medians = {
        choice: statistics.median(times[set_up.key(model, choice)][::2])
        for choice in set_up.choices
    }
    return min(medians, key=medians.__getitem__)


def _compared(set_up: SetUp, seconds: list[float]) -> list[float]:
    """Return the seconds per step of the blocks that are compared with other set-ups.

    With tuning they are the second block and every other one after it, since `_fastest`
    has chosen the variant by the remaining blocks. With defaults there is no choice,
    and all blocks are compared.

    Args:
        set_up: `SetUp` that was measured.
        seconds: List of floats, seconds per step of each block.
    """
    return seconds[1::2] if set_up.tuning == TUNED else seconds


def _milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds, such as "1.50"; `None` as "-"."""
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def _ratio(row: Row, kind: str) -> str:
    """Format the ratio of a row's time to that of a set-up of tfdp, with its interval.

    Args:
        row: `Row` of the table.
        kind: String, `DEVICES` or `WORKERS`, the set-up of tfdp.

    Returns:
        String such as `"1.200 [1.100, 1.300]"`, or `"-"` without a ratio.
    """
    ratio = row.speed_of_tfdp.get(kind)
    return f"{ratio.median:.3f} {ratio.interval}" if ratio else "-"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "set-up": lambda row: row.set_up,
    "settings": lambda row: row.settings,
    "model": lambda row: row.model,
    "step\n(ms)": lambda row: _milliseconds(row.step_seconds),
    "own step\n(ms)": lambda row: _milliseconds(row.own_step_seconds),
    "communi-\ncation (ms)": lambda row: _milliseconds(row.communication_seconds),
    "samples/s": lambda row: f"{row.samples_per_second:.0f}",
    **{
        f"speed of tfdp's {name}\n/ its speed": functools.partial(_ratio, kind=kind)
        for kind, name in OURS.items()
    },
}


def plot(title: str, rows: Sequence[Row], caption: str, path: Path) -> None:
    """Plot tfdp's speed relative to each rival, one panel for each set-up of tfdp.

    Args:
        title: String, title of the plot.
        rows: Sequence of `Row`, the table.
        caption: String, the machine and the versions.
        path: Path of the PNG file.
    """
    figure, panels = output.new_panels(title, len(OURS), caption)
    models = list(dict.fromkeys(row.model for row in rows))
    # Rows of tfdp have no ratio to themselves, so only the rows of rivals are plotted,
    # as bars grouped by rival.
    rivals: dict[str, list[Row]] = {}
    for row in rows:
        if set(row.speed_of_tfdp) == set(OURS):
            tuning = row.settings.partition(":")[0]
            rivals.setdefault(f"{row.set_up}, {tuning}", []).append(row)
    for (kind, name), axes in zip(OURS.items(), panels, strict=True):
        for index, (rival, of_rival) in enumerate(rivals.items()):
            ratios = [row.speed_of_tfdp[kind] for row in of_rival]
            _draw(axes, ratios, rival, (index, len(rivals)))
        axes.axhline(1.0, color="0.2", linestyle="--", linewidth=1)
        axes.set_xticks(range(len(models)), [f"{m} parameters" for m in models])
        axes.grid(visible=False, axis="x")
        axes.set_title(f"speed of tfdp's {name} relative to each", fontsize=10)
        axes.set_ylabel("above 1: tfdp is faster")
        axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
    panels[0].legend(ncols=2, loc="upper left", frameon=False, fontsize=8)
    output.save(figure, path)


def _draw(axes: Axes, ratios: list[Ratio], label: str, place: tuple[int, int]) -> None:
    """Draw the bars of one rival, next to those of the others.

    Args:
        axes: The axes to draw on.
        ratios: List of `Ratio`, one for each model.
        label: String, name of the rival.
        place: Tuple of the index of the rival and the number of rivals.
    """
    index, count = place
    width = 0.8 / count
    shift = (index - (count - 1) / 2) * width
    places = [number + shift for number in range(len(ratios))]
    lows = [ratio.median - ratio.low for ratio in ratios]
    highs = [ratio.high - ratio.median for ratio in ratios]
    axes.bar(
        *(places, [ratio.median for ratio in ratios], 0.9 * width),
        yerr=[lows, highs],
        capsize=3,
        ecolor="0.25",
        label=label,
    )
    for x, ratio in zip(places, ratios, strict=True):
        axes.annotate(
            f"{ratio.median:.2f}",
            (x, 0),
            (0, 4),  # points above the axis, where no interval covers the text
            textcoords="offset points",
            ha="center",
            color="white",
            fontsize=8,
        )
