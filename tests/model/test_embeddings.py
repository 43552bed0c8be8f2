"""Which layer reads which value table, and the table of token pairs."""

import pytest
import torch
from torch import Tensor

from speedrun.config.architecture import ModelConfig
from speedrun.errors import ConfigError
from speedrun.model.attention import Attention
from speedrun.model.embeddings import table_of_layer

from .test_gpt import T, ids_of, lively, plan, small


def test_which_layer_reads_which_value_table() -> None:
    assert table_of_layer(ModelConfig(value_embeddings="each")) == list(range(12))
    mirrored = table_of_layer(ModelConfig(value_embeddings="mirrored"))
    assert mirrored == [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
    ends = table_of_layer(ModelConfig(value_embeddings="ends"))
    assert ends == [0, 1, 2, None, None, None, None, None, None, 0, 1, 2]


def test_a_bigram_row_is_found_by_the_pair_and_starts_at_zero() -> None:
    rows = 50
    model, plain = lively(bigram_rows=rows), lively()
    table = model.bigrams.table.weight  # type: ignore[union-attr]
    assert not table.any()
    ids, documents = ids_of(), torch.zeros(1, T, dtype=torch.int32)
    documents[:, 100:] = 1
    given: list[Tensor] = []
    model.bigrams.register_forward_hook(lambda *seen: given.append(seen[2]))  # type: ignore[union-attr]
    with torch.no_grad():
        plain.load_state_dict({k: v for k, v in model.state_dict().items() if "bigrams" not in k})
        assert torch.equal(model(ids, plan(documents)), plain(ids, plan(documents)))
        table.normal_()
        model(ids, plan(documents))
    for t in range(T):
        pair = (36313 * int(ids[0, t])) ^ (27191 * int(ids[0, t - 1]))
        row = rows - 1 if t in (0, 100) else pair % (rows - 1)
        assert torch.equal(given[1][0, t], table[row])


@pytest.mark.parametrize("weights", ["blend", "pair"])
def test_how_values_take_up_their_embeddings(weights: str) -> None:
    """blend: (1 - l) v + l e, pair: l1 v + l2 e; a layer without a table has its share of v."""
    model = lively(value_embeddings="ends", value_tables=1, value_weights=weights, layers=4)
    table = model.get_parameter("value_embeddings.tables.0.weight")
    ids, heads = ids_of(), 4
    for layer, has_table in ((0, True), (1, False), (3, True)):
        attention = model.get_submodule(f"blocks.{layer}.attention")
        assert isinstance(attention, Attention)
        assert attention.blend is not None
        own, *other = attention.blend.tolist()
        if weights == "blend":
            assert not other
            own, other = 1 - own, [own]
        v = torch.randn(1, T, heads, 64 // heads)
        given = model.value_embeddings(ids)[layer]
        assert (given is not None) == has_table
        expected = own * v
        if has_table:
            expected = expected + other[0] * table[ids].view_as(v)
        torch.testing.assert_close(attention.mix_values(v, given), expected)


def test_no_value_table_for_a_layer_without_attention() -> None:
    config = small(value_embeddings="each", value_weights="pair", attention_free=(1,))
    assert table_of_layer(config) == [0, None, 1, 2]
    with pytest.raises(ConfigError, match=r"take 0 out of model\.attention_free"):
        small(value_residual=True, attention_free=(0,))
