"""Stock models out of the common: hybrids, and those without plain embeddings or whose rows don't sum to one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from regard.inspection.attention import attention_map
from tests.inspection.conftest import SMALL, TEXT


def _make(name: str, tokenizer: Any, **config: Any) -> Any:
    config_class = getattr(transformers, f"{name.removesuffix('ForCausalLM').removesuffix('Model')}Config")
    torch.manual_seed(0)
    return getattr(transformers, name)(config_class(vocab_size=len(tokenizer), **{**SMALL, **config})).eval()


def test_layers_of_a_hybrid_that_attend_are_shown(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["bytes"]
    recurrent = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}
    heads = {"num_key_value_heads": 2, "num_experts": 2, "intermediate_size": 16}
    model = _make("JambaForCausalLM", tokenizer, num_hidden_layers=4, **recurrent, **heads)
    found = attention_map(model, tokenizer, TEXT)
    model.set_attn_implementation("eager")
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        given = model.base_model(**inputs, use_cache=False, output_attentions=True).attentions
    expected = torch.cat([layer for layer in given if layer is not None])
    assert found.layers == 2
    np.testing.assert_array_equal(found.weights, expected.numpy())
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
