"""The forms of a model that an export can make, as they are typed. Knows nothing of how they are made."""

from typing import Literal, NamedTuple

from training.config import ConfigError


class Form(NamedTuple):
    """A file of a version: its name, who reads it and what it computes in."""

    path: str
    format: Literal["onnx", "torchscript"]
    precision: Literal["float32", "float16", "int8"]


FORMS = {
    "onnx": Form("model.onnx", "onnx", "float32"),
    "float16": Form("model.float16.onnx", "onnx", "float16"),
    "int8": Form("model.int8.onnx", "onnx", "int8"),
    "torchscript": Form("model.torchscript", "torchscript", "float32"),
}
"""What can be asked for, and the file that it becomes."""


def formats_of(given: str) -> list[str]:
    """What was asked for, in the order of FORMS. Raises ConfigError."""
    asked = {name.strip() for name in given.split(",")}
    if unknown := sorted(asked - set(FORMS)):
        raise ConfigError(f"--formats: there is no {unknown[0]!r}, only {', '.join(FORMS)}")
    for name in ("float16", "int8"):
        if name in asked and "onnx" not in asked:
            raise ConfigError(
                f"--formats: {given} has {name} without onnx, which it is made from and judged by"
            )
    return [name for name in FORMS if name in asked]
