"""Which models the kernels take, said before anything is loaded."""

from dataclasses import replace

import pytest

from dsv4 import kernels
from dsv4.config import PRESETS
from dsv4.errors import UserError


@pytest.mark.parametrize("preset", PRESETS)
def test_the_published_models_and_the_bundled_one(preset):
    kernels.refuse_sizes(PRESETS[preset])


@pytest.mark.parametrize("name,value", [
    ("head_dim", 256), ("qk_rope_head_dim", 32), ("hc_mult", 2), ("index_head_dim", 64), ("index_n_heads", 32), ("index_topk", 2000),
    ("hidden_size", 196), ("hidden_size", 8200), ("q_lora_rank", 62), ("q_lora_rank", 4096), ("o_lora_rank", 24),
    ("moe_intermediate_size", 100), ("n_routed_experts", 400), ("num_experts_per_tok", 9), ("vocab_size", 200_000),
])
def test_other_sizes_are_named(name, value):
    with pytest.raises(UserError, match=f"--backend cuda: expected {name} to be .*, found {value}: run with --backend torch") as caught:
        kernels.refuse_sizes(replace(PRESETS["flash"], **{name: value}))
    assert "\n" not in str(caught.value)


def test_without_an_indexer_its_sizes_do_not_matter():
    config = replace(PRESETS["tiny"], compress_ratios=(0, 128, 0, 128, 0, 0), index_head_dim=64, index_n_heads=2)
    kernels.refuse_sizes(config)
