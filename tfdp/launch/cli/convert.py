"""`tfdp convert`: one Keras file from a checkpoint of any number of workers."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from tfdp.checkpoint.index import Index
from tfdp.checkpoint.index_file import load_index
from tfdp.ground.base.files import replaced
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.errors import first_line, import_without_gpus, usage_errors

_EXAMPLES = """\b
Example:
  tfdp convert checkpoints/last model.keras
"""


@click.command(epilog=_EXAMPLES)
@click.argument("directory", metavar="DIR", type=types.FILE)
@click.argument("output", metavar="MODEL.keras", type=types.FILE)
@types.option("--force", "Replace MODEL.keras if it exists.")
def convert(directory: str, output: str, force: bool) -> None:
    """Turn the checkpoint in DIR into the ordinary file MODEL.keras.

    DIR is what `tfdp.checkpoint.save` wrote. The model and the state of its
    optimizer must fit into the memory of this machine; no GPU is used.
    """
    _check_output(output, force)
    index = _read_index(directory)
    checkpoint = import_without_gpus("tfdp.checkpoint")
    import_without_gpus("tfdp.optimizers")  # registers `LARS`, which the model may use
    model = _build_model(index, directory)
    with usage_errors(ValueError, OSError, text_of=first_line):
        checkpoint.restore(model, directory)
    _save(model, output)
    click.echo(f"Wrote {output}.")


def _check_output(output: str, force: bool) -> None:
    """Raise a usage error if the output file cannot or must not be written.

    Args:
        output: String, path of the file.
        force: Bool, whether an existing file may be replaced.
    """
    folder = os.path.dirname(output) or "."
    if not output.endswith(".keras"):
        fault = "The name of the file must end in .keras."
    elif not os.path.isdir(folder):
        fault = "The folder of the file does not exist; create it."
    elif os.path.isdir(output):
        fault = "The name is that of a directory; give the name of a file."
    elif os.path.exists(output) and not force:
        fault = "The file already exists; give --force to replace it."
    else:
        return
    raise click.UsageError(f"{fault} Received: {output}")


def _read_index(directory: str) -> Index:
    """Load a checkpoint's index; raise a usage error if it has no model."""
    if os.path.isfile(directory):
        raise click.UsageError(
            "DIR is a file; give the directory that `tfdp.checkpoint.save` wrote. "
            f"Received: {directory}"
        )
    with usage_errors(ValueError, OSError):
        index = load_index(directory)
    if index.model is None:
        raise _cannot_build("Keras could not serialize it", directory)
    return index


def _build_model(index: Index, directory: str) -> Any:
    """Build the saved model, compiled and with its optimizer built.

    Args:
        index: `Index` of the checkpoint.
        directory: String, the checkpoint, for an error.

    Raises:
        click.UsageError: If the model cannot be built without its script.
    """
    import keras

    from tfdp.ground._compat import keras_model

    try:
        model = keras.saving.deserialize_keras_object(json.loads(index.model or ""))
        if not isinstance(model, keras.Model):
            raise TypeError(f"its index has a {type(model).__name__} in its place")
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        for layer in keras_model.layers_of(model):
            # A checkpoint stores the values of variables. The vocabulary that `adapt`
            # has found is in a lookup table instead, so the built model may lack it.
            vocabulary = getattr(layer, "get_vocabulary", None)
            if vocabulary and not vocabulary(include_special_tokens=False):
                raise ValueError(f"{layer.name!r} lacks its vocabulary, from `adapt`")
    except Exception as error:  # a custom class may raise anything
        # Keras quotes the error of a nested object, which is the cause, at the end of
        # its own text.
        _, _, cause = str(error).rpartition("Exception encountered: ")
        why = first_line(ValueError(cause)).split(". ")[0]
        raise _cannot_build(why, directory) from error
    return model


def _cannot_build(why: str, directory: str) -> click.UsageError:
    """Return the error of a model that needs its script to be built.

    Args:
        why: String, a clause with the reason.
        directory: String, the checkpoint.
    """
    return click.UsageError(
        f"The model cannot be built without its script ({why}); call "
        f"`tfdp.checkpoint.restore` and `model.save` there. Received: {directory}"
    )


def _save(model: Any, output: str) -> None:
    """Save a model to a temporary file, and rename the file to `output`.

    A failure leaves no incomplete file, and raises `click.ClickException`.
    """
    try:
        with replaced(output) as temporary:
            model.save(temporary)
    except Exception as error:  # a full disk raises errors of several classes
        raise click.ClickException(
            f"The file cannot be written ({first_line(error)}). Received: {output}"
        ) from error
