"""The run in small: the same architecture, mesh and tokenizer with dimensions that a laptop can train."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import yaml

from ops.terminal import UserError

SEQUENCE_LENGTH = 32
STAND_IN_TOKENIZER = {"tokenizer_path": "tokenizer.llama2", "tokenizer_type": "sentencepiece"}
STAND_IN_VOCABULARY = 32_000

# A dimension of the model's own MaxText file becomes at most this. What it does not have stays absent: dense models
# get no experts, only MLA models get LoRA ranks.
SMALL: dict[str, int] = {
    "head_dim": 16,
    "global_head_dim": 16,
    "base_mlp_dim": 64,
    "base_moe_mlp_dim": 64,
    "num_experts_per_tok": 2,
    "sliding_window_size": 32,
    "chunk_attn_window_size": 32,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 32,
    "gdn_key_head_dim": 16,
    "gdn_value_head_dim": 16,
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 4,
    "gdn_chunk_size": 16,
}


def maxtext_folder() -> Path:
    """Return where the maxtext package lies, without importing it (that takes 20 s and more)."""
    spec = importlib.util.find_spec("maxtext")
    if spec is None or spec.origin is None:
        raise UserError("the package maxtext is not installed here: run `make setup`")
    return Path(spec.origin).parent


def small_mesh(config: dict[str, Any], devices: int) -> dict[str, int]:
    """Return the run's ICI axes fitted to `devices` JAX devices a slice: the largest axes shrink until they do.

    An axis of -1 stays and takes what is left. Axes that are not in the config keep MaxText's default.
    """
    axes = {key: int(value) for key, value in config.items() if key.startswith("ici_") and key.endswith("_parallelism")}
    fills = -1 in axes.values()

    def product() -> int:
        return math.prod(size for size in axes.values() if size > 1)

    while devices % product() if fills else product() > devices:
        largest = max(axes, key=lambda key: axes[key])
        axes[largest] //= next(factor for factor in range(2, axes[largest] + 1) if axes[largest] % factor == 0)
    return axes


def small_model(model: str, mesh: dict[str, int], devices: int, vocabulary: int | None) -> dict[str, Any]:
    """Return MaxText settings for `model` in small, shardable over `mesh` on `devices` JAX devices a slice.

    `vocabulary` replaces the model's own number of tokens when a stand-in tokenizer is used.
    """
    own = yaml.safe_load((maxtext_folder() / "configs" / "models" / f"{model}.yml").read_text())
    small: dict[str, Any] = {key: min(own[key], limit) for key, limit in SMALL.items() if isinstance(own.get(key), int)}
    # Attention heads are atomic under tensor parallelism; grouped heads stay grouped.
    kv_heads = max(2, math.prod(size for axis, size in mesh.items() if axis.startswith("ici_tensor") and size > 1))
    grouped = own["base_num_query_heads"] > own["base_num_kv_heads"]
    small |= {
        "base_emb_dim": max(32, devices),  # FSDP over every device shards it
        "base_num_kv_heads": kv_heads,
        "base_num_query_heads": kv_heads * (2 if grouped else 1),
        # One whole pattern of layer kinds, where the model has one, and at least one layer after the dense ones.
        "base_num_decoder_layers": max(
            2, own.get("inhomogeneous_layer_cycle_interval", 1), own.get("first_num_dense_layers", 0) + 1
        ),
    }
    if "num_experts" in own:
        small["num_experts"] = max(4, mesh.get("ici_expert_parallelism", 1))
    if vocabulary is not None:
        small["vocab_size"] = vocabulary
    return small


def tokenizer(config: dict[str, Any]) -> tuple[dict[str, str], bool]:
    """Return the tokenizer settings to rehearse with, and whether they are the run's own.

    The run's own tokenizer is used when the MaxText package carries it, since a rehearsal needs no network.
    """
    path = str(config.get("tokenizer_path") or "")
    if path and (maxtext_folder() / "assets" / "tokenizers" / path).exists():
        return {"tokenizer_path": path, "tokenizer_type": str(config["tokenizer_type"])}, True
    return STAND_IN_TOKENIZER, False
