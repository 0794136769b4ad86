"""helpers/compare_oracle.py: agreement, disagreement, and what it does with what it cannot compare."""

import pytest
import torch

from dsv4.config import ModelConfig
from helpers import compare_oracle
from helpers.make_checkpoint import random_weights, write_checkpoint
from reference import oracle
from tests.hf import hf_configs


def test_the_bundled_checkpoint_agrees_layer_by_layer(capsys):
    assert compare_oracle.main(["--prompt-ids", ",".join(map(str, range(3, 43))), "--chunk", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["relative", *["layer"] * 6, "logits"]


@pytest.mark.parametrize("spoil, first", [(lambda X: X * 1.001, "layer 3"), (lambda X: X * float("nan"), "layer 3")])
def test_a_difference_is_found_where_it_begins(monkeypatch, capsys, spoil, first):
    block = oracle.block

    def wrong(config, layer, *args, **kwargs):
        X = block(config, layer, *args, **kwargs)
        return spoil(X) if layer == 3 else X

    monkeypatch.setattr(oracle, "block", wrong)
    assert compare_oracle.main(["--prompt-ids", "3,4,5,6,7"]) == 1
    assert f"first over 1e-4: {first}" in capsys.readouterr().out


def test_what_cannot_be_compared(capsys, tmp_path):
    config = ModelConfig.from_dict(hf_configs()["small"])
    write_checkpoint(tmp_path, config, random_weights(config), "hybrid")
    for argv, code, words in ((["--model", "/nonexistent"], 3, "/nonexistent"), (["--layers", "5:9"], 2, "--layers: expected at most 0:6"),
                              (["--model", str(tmp_path)], 3, "native names only"), (["--prompt-ids", "5000"], 2, "token id 5000")):
        assert compare_oracle.main(argv) == code
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and words in error
    assert not torch.is_inference_mode_enabled()
