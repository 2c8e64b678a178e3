from unittest.mock import Mock

import numpy as np
import pytest
from scipy import stats

from pytensor_ml import generation
from pytensor_ml.generation import Decoder, generate, sample
from pytensor_ml.layers import (
    DecoderBlock,
    Embedding,
    GatedFeedForward,
    Linear,
    MultiheadAttention,
    RMSNorm,
    RotaryEmbedding,
    TransformerBlock,
    TransformerStack,
)
from pytensor_ml.models import CausalLM
from pytensor_ml.pytensorf import collect_rng_updates

VOCABULARY = 7
LOGITS = np.log(np.array([[0.05, 0.4, 0.1, 0.4, 0.05]], "float32"))


def draw(n=4000, seed=0, **options):
    rng = np.random.default_rng(seed)
    settings = {"temperature": 1.0, "top_k": None, "top_p": 1.0} | options
    return np.array([sample(LOGITS, rng=rng, **settings)[0] for _ in range(n)])


def frequencies(draws):
    return np.bincount(draws, minlength=5) / len(draws)


@pytest.mark.compiles_nothing
def test_greedy_takes_the_lowest_of_equal_logits():
    assert draw(n=1, temperature=0.0) == [1]


@pytest.mark.compiles_nothing
def test_draws_follow_the_softmax_at_a_temperature():
    squared = np.exp(2 * LOGITS[0].astype("float64"))
    expected = squared / squared.sum()
    counts = np.bincount(draw(temperature=0.5), minlength=5)
    assert stats.chisquare(counts, expected * counts.sum()).pvalue > 1e-3


@pytest.mark.compiles_nothing
def test_top_k_and_top_p_keep_the_likeliest_and_renormalize():
    assert set(draw(top_k=1)) == {1}
    np.testing.assert_allclose(frequencies(draw(top_k=3)), [0, 4 / 9, 1 / 9, 4 / 9, 0], atol=0.03)
    np.testing.assert_allclose(frequencies(draw(top_p=0.75)), [0, 0.5, 0, 0.5, 0], atol=0.03)
    assert set(draw(top_p=0.3)) == {1}


@pytest.mark.compiles_nothing
def test_the_lowest_ids_win_ties_for_a_place_in_the_top_k():
    rng = np.random.default_rng(0)
    tied = np.tile(np.array([0, 1], "float32"), (200, 500))
    assert set(sample(tied, temperature=1.0, top_k=3, top_p=1.0, rng=rng)) == {1, 3, 5}


@pytest.mark.compiles_nothing
def test_a_seed_reproduces_draws():
    np.testing.assert_array_equal(draw(n=50, seed=1), draw(n=50, seed=1))
    assert not np.array_equal(draw(n=50, seed=1), draw(n=50, seed=2))


@pytest.fixture(scope="module")
def model():
    """An untrained model whose next token is the id before, modulo the vocabulary."""
    block = DecoderBlock(
        "block",
        attention=MultiheadAttention("attn", n_embd=8, n_head=2, bias=False, is_causal=True),
        feed_forward=GatedFeedForward("mlp", d_model=8, hidden_dim=4),
        attention_norm=RMSNorm("norm1", n_in=8),
        feed_forward_norm=RMSNorm("norm2", n_in=8),
    )
    embedding = Embedding("tokens", n_embeddings=VOCABULARY, n_features=8)
    rows = np.eye(VOCABULARY, 8, dtype=embedding.W.type.dtype)
    embedding.W.set_value(rows)
    for silent in (block.attention.out_proj, block.feed_forward.down):
        silent.W.set_value(np.zeros_like(silent.W.get_value()))
    shift = np.roll(np.eye(8, dtype=rows.dtype)[:VOCABULARY, :VOCABULARY], -1, axis=1)
    norm = RMSNorm("norm", n_in=8)
    rotary = RotaryEmbedding("rotary", rotary_dim=4)
    head = Linear("head", n_in=8, n_out=VOCABULARY, bias=False)
    head.W.set_value(np.vstack([shift, np.zeros((1, VOCABULARY), rows.dtype)]))
    return CausalLM(
        embedding=embedding,
        stack=TransformerStack("stack", [block], rotary=rotary),
        norm=norm,
        head=head,
        max_positions=32,
    )


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder(model, batch_size=2, capacity=8)


def test_a_prompt_begins_with_the_parameters_as_they_are(model, decoder):
    before, weight = decoder.begin([[3], [1]]), model.head.W
    value = weight.get_value()
    weight.set_value(2 * value)
    twice = decoder.begin([[3], [1]])
    weight.set_value(value)
    np.testing.assert_allclose(twice, 2 * before, rtol=1e-6)


def test_rows_end_by_themselves_and_generation_when_all_have(decoder):
    tokens = np.array(list(generate(decoder, [[3], [6, 5]], max_new_tokens=6, eos_ids={2})))
    np.testing.assert_array_equal(tokens, [[2, 4], [2, 3], [2, 2]])


def test_generation_stops_at_the_number_of_tokens(decoder):
    tokens = np.array(list(generate(decoder, [[0], [1]], max_new_tokens=3)))
    np.testing.assert_array_equal(tokens, [[6, 0], [5, 6], [4, 5]])


def test_bad_prompts_are_refused_before_anything_runs(decoder):
    with pytest.raises(ValueError, match="A prompt is empty"):
        decoder.begin([[1], []])
    with pytest.raises(ValueError, match="Got 1 prompts for a decoder of 2 rows"):
        decoder.begin([[1]])
    with pytest.raises(ValueError, match="9 tokens after 0 do not fit into a context of 8"):
        decoder.begin([[1] * 9, [1]])
    with pytest.raises(ValueError, match="prompt of 6 tokens and 4 new ones do not fit"):
        generate(decoder, [[1] * 6, [1]], max_new_tokens=4)
    with pytest.raises(ValueError, match="Got 1 prompts"):
        generate(decoder, [[1]], max_new_tokens=1)
    for prompts in ([3, 4], "ab", [np.int64(3)]):
        with pytest.raises(TypeError, match=r"sequences of ids, one a row.*\[ids\]"):
            generate(decoder, prompts, max_new_tokens=1)
        with pytest.raises(TypeError, match="sequences of ids, one a row"):
            decoder.begin(prompts)
    with pytest.raises(TypeError, match="Tokenize it first"):
        decoder.begin([[1.5], [2]])
    with pytest.raises(ValueError, match="logits are not finite"):
        sample(
            np.array([[0, np.nan]]),
            temperature=0.0,
            top_k=None,
            top_p=1.0,
            rng=np.random.default_rng(),
        )


def test_a_generation_notices_that_another_has_taken_its_decoder(decoder):
    first = generate(decoder, [[0], [1]], max_new_tokens=3)
    next(first)
    next(generate(decoder, [[2], [3]], max_new_tokens=3))
    with pytest.raises(RuntimeError, match="begun other prompts"):
        next(first)


def test_ids_and_numbers_out_of_range_are_refused(decoder):
    with pytest.raises(ValueError, match=r"Ids run from 1 to 7, but the vocabulary is 0 to 6"):
        decoder.begin([[1], [7]])
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        decoder.extend(np.array([1, 2]))
    for wrong in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}):
        [(name, value)] = wrong.items()
        with pytest.raises(ValueError, match=rf"{name}.*{value}"):
            generate(decoder, [[1], [2]], max_new_tokens=1, **wrong)
        with pytest.raises(ValueError, match=rf"{name}.*{value}"):
            draw(n=1, **wrong)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        generate(decoder, [[1], [2]], max_new_tokens=0)


def test_a_prompt_that_is_too_long_leaves_what_was_there(decoder):
    decoder.begin([[1, 2], [3]])
    with pytest.raises(ValueError, match="do not fit"):
        decoder.begin([[1] * 9, [1]])
    assert decoder.length == 2
    assert decoder.extend(np.array([[4], [5]])).argmax(axis=-1).tolist() == [3, 4]


@pytest.mark.compiles_nothing
def test_generation_drops_dropout(monkeypatch):
    block = TransformerBlock("block", d_model=4, n_head=1, dropout=0.9)
    model = CausalLM(
        embedding=Embedding("tokens", n_embeddings=VOCABULARY, n_features=4),
        stack=TransformerStack("stack", [block], rotary=None),
        norm=RMSNorm("norm", n_in=4),
        max_positions=4,
    )
    compiled = []
    monkeypatch.setattr(
        generation, "function", lambda *args, **kwargs: compiled.append((args, kwargs)) or Mock()
    )
    Decoder(model)
    [((_, logits), options)] = compiled
    assert not collect_rng_updates([logits, *options["updates"].values()])


@pytest.mark.compiles_nothing
def test_a_capacity_beyond_the_model_is_refused():
    model = CausalLM(
        embedding=Embedding("tokens", n_embeddings=3, n_features=4),
        stack=TransformerStack("stack", [], rotary=None),
        norm=RMSNorm("norm", n_in=4),
        max_positions=32,
    )
    with pytest.raises(ValueError, match=r"capacity of 33 tokens.*1 to 32"):
        Decoder(model, capacity=33)
    with pytest.raises(TypeError, match="RMSNorm has no max_positions, embedding, stack, extend"):
        Decoder(RMSNorm("norm", n_in=4))
