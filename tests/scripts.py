"""The tiny classifier of `tests.models` as a TorchScript file. Needs torch, not transformers."""

import io
import warnings
from collections.abc import Sequence
from typing import Literal

import torch

from tests.models import PLAIN_INPUTS, Weights


def scripted(code: str, **parameters: torch.Tensor) -> bytes:
    """A file with this `forward`, from its arguments on, and with these parameters."""
    holder: torch.nn.Module = type("Odd", (torch.nn.Module,), {})()
    for name, value in parameters.items():
        holder.register_parameter(name, torch.nn.Parameter(value))
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        script = torch.jit.script(holder)
        script.define(f"def forward(self, {code}\n")
        torch.jit.save(script, content)
    return content.getvalue()


def make_script(
    weights: Weights,
    *,
    inputs: Sequence[str] = PLAIN_INPUTS,
    output: Literal["float", "double"] = "float",
    half: bool = False,
) -> bytes:
    """The masked mean of embeddings and one linear layer: `inputs` int64[n, length] -> logits[n, labels].

    An input other than the two first changes nothing. With `half` the weights are stored as float16.
    """
    content = io.BytesIO()
    # A class of its own for each file: torch compiles the `forward` of a class once.
    holder: torch.nn.Module = type("Tiny", (torch.nn.Module,), {})()
    for name, table in (("embedding", weights.embedding), ("kernel", weights.kernel)):
        values = torch.from_numpy(table)
        holder.register_parameter(name, torch.nn.Parameter(values.half() if half else values))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        script = torch.jit.script(holder)
        script.define(
            f"""
def forward(self, {", ".join(f"{name}: Tensor" for name in inputs)}) -> Tensor:
    real = {inputs[1]}.to(torch.float32).unsqueeze(2)
    words = torch.nn.functional.embedding({inputs[0]}, self.embedding)
    mean = (words * real).sum(1) / real.sum(1)
    return torch.matmul(mean, self.kernel).to(torch.{output})
"""
        )
        torch.jit.save(script, content)
    return content.getvalue()
