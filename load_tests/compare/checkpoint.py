"""Writes a folder that `transformers` loads, versions 4 and 5 alike, from a version of the store.

    python -m load_tests.compare.checkpoint model_store/<name>/<version> FOLDER

The weights are those of `model.onnx` (float16 values in float32), and the tokenizer is the version's own.
Needs the extra `train`. Knows nothing of servers.
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import save_file

from training.graph import graph_weights, rebuild

KEPT = (
    *("model_type", "vocab_size", "hidden_size", "hidden_act", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "max_position_embeddings", "type_vocab_size"),
    *(
        "layer_norm_eps",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "pad_token_id",
        "problem_type",
    ),
)


def write_checkpoint(version: Path, folder: Path) -> None:
    """Fill the folder, which is made anew. Raises GraphError: the file and the manifest do not fit."""
    manifest = json.loads((version / "manifest.json").read_text(encoding="utf-8"))
    architecture = manifest["architecture"]
    model = rebuild(graph_weights(version / "model.onnx"), architecture)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # Written by hand: what one release of the library saves, an older one does not always read.
    config = {name: architecture[name] for name in KEPT} | {
        "architectures": [type(model).__name__],
        "id2label": {str(index): label for index, label in enumerate(manifest["labels"])},
        "label2id": {label: index for index, label in enumerate(manifest["labels"])},
        "torch_dtype": "float32",
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": manifest["max_tokens"],
        "padding_side": manifest["padding_side"],
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "mask_token": "[MASK]",
    }
    for name, content in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    shutil.copyfile(version / "tokenizer.json", folder / "tokenizer.json")


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
