"""Which weights of a library model learn, and how much its attention forgets while it does.

Knows nothing of data or of how a model is trained.
"""

from torch import nn
from transformers import PreTrainedModel

from training.config import ConfigError


def freeze(model: PreTrainedModel, layers: int) -> None:
    """Of the encoder only what comes after the first `layers` layers learns; the head always does.

    What all layers share (the position bias of mpnet) is kept, too: it would lead the gradient through the
    layers that do not learn. Raises ConfigError when there are not so many layers.
    """
    base = model.base_model
    lists = [part for part in base.modules() if isinstance(part, nn.ModuleList)]
    if len(lists) != 1 or len(lists[0]) < layers:
        raise ConfigError(f"freeze_layers: the base has not one list of {layers} layers or more")
    base.requires_grad_(False)
    for part in (*lists[0][layers:], getattr(base, "pooler", None)):
        if part is not None:
            part.requires_grad_(True)


def set_attention_dropout(model: PreTrainedModel, share: float) -> None:
    """Sets the dropout of attention in every layer; raises ConfigError where there is none to set."""
    parts = [part for part in model.base_model.modules() if "SelfAttention" in type(part).__name__]
    dropouts = [one for part in parts for one in part.children() if isinstance(one, nn.Dropout)]
    if not dropouts:
        raise ConfigError("attention_dropout: the base has no dropout in its attention")
    for dropout in dropouts:
        dropout.p = share
