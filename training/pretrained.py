"""Opens models and tokenizers of transformers: a base to fine-tune, or a fine-tuned classifier to read with.

Knows nothing of data, runs or versions. A local folder is opened without the network.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from training.config import ConfigError
from training.own import MODEL_TYPE, OwnConfig, is_own, load_own

# These count positions from pad_id + 1, so that as many rows of their table are never used.
OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet"})


def load_tokenizer(base: str) -> Any:
    """The fast tokenizer of a model, without the padding and truncation that its file may bring.

    Raises ConfigError when it has no tokenizer of the `tokenizers` library, which is what the service reads.
    """
    try:
        ours = {"config": OwnConfig.from_pretrained(base)} if is_own(Path(base)) else {}
        tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=is_local(base), **ours)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{base}: its tokenizer cannot be opened: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"{base}: it has no fast tokenizer (tokenizer.json)")
    clear_limits(tokenizer)
    # As the service does: the head reads what stands first.
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return tokenizer


def clear_limits(tokenizer: Any) -> None:
    """Removes padding and truncation, which a tokenizer keeps from its last call and writes into its file."""
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()


def load_base(base: str, labels: tuple[str, ...]) -> tuple[PreTrainedModel, list[str]]:
    """A classifier with these labels on the encoder of `base`, in float32, and the names of its new weights.

    The head is new, and so is the pooler when the base has none. Raises ConfigError when the base lacks other
    weights of its encoder: then it is another kind of model.
    """
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            base,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={name: index for index, name in enumerate(labels)},
            problem_type="single_label_classification",
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            local_files_only=is_local(base),
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{base}: not a model that can be fine-tuned: {error}") from error
    fresh = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    body = [key for key in fresh if key.startswith(f"{model.base_model_prefix}.") and ".pooler." not in key]
    if body:
        raise ConfigError(f"{base}: it lacks {len(body)} weights of its encoder, first {body[0]}")
    _refuse_strays(base, model, report["unexpected_keys"])
    return model, fresh


def load_classifier(folder: Path) -> PreTrainedModel:
    """A fine-tuned classifier, in float32 and without dropout. Raises ConfigError when it is not one."""
    if is_own(folder):
        return load_own(folder)
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: not a classifier of transformers: {error}") from error
    _refuse_strays(str(folder), model, report["unexpected_keys"])
    if report["missing_keys"]:
        raise ConfigError(f"{folder}: not fine-tuned, {min(report['missing_keys'])} is missing")
    if report["mismatched_keys"]:
        name, has, wanted = min(report["mismatched_keys"])
        raise ConfigError(f"{folder}: {name} is {[*has]}, and its configuration says {[*wanted]}")
    classifier: PreTrainedModel = model.eval()
    return classifier


def _refuse_strays(source: str, model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Raises ConfigError for weights of the encoder that the network has no place for: it is another network.

    The library leaves them out in silence: more layers than the configuration says, relative positions. The
    answer does not depend on a head of another task, a pooler that is not read, and old buffers.
    """
    strays = [
        name
        for name in unexpected
        if (name.startswith(f"{model.base_model_prefix}.") or ".layer." in name)
        and ".pooler." not in name
        and not name.endswith(".position_ids")
    ]
    if strays:
        raise ConfigError(
            f"{source}: {min(strays)} has no place in the network that its configuration describes"
        )


def label_names(config: Any) -> tuple[str, ...]:
    """The labels of a model's configuration, in index order."""
    return tuple(config.id2label[index] for index in sorted(config.id2label))


def usable_tokens(config: Any) -> int | None:
    """The longest text that a model has positions for, special tokens included; None: it sets no limit."""
    if config.model_type == MODEL_TYPE:
        return int(config.encoder["max_tokens"])
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is not None and config.model_type in OFFSET_POSITIONS:
        return positions - (config.pad_token_id or 0) - 1
    return positions


def is_local(base: str) -> bool:
    """Whether `base` is a folder. Raises ConfigError when it is written like a path and is none."""
    if Path(base).is_dir():
        return True
    if base.startswith((".", "/", "~")) or base.endswith("/") or base.count("/") > 1:
        raise ConfigError(f"{base}: there is no such folder")
    return False
