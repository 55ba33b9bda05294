import pytest
import torch

from model.generate import generate


def test_greedy_continuation_is_the_likeliest_token_each_time(make_model, tokens):
    model = make_model()
    out = generate(model, tokens, 9, temperature=0)
    assert out.shape == (3, 28)
    assert torch.equal(out[:, :19], tokens)
    # The model is causal, so one pass over the result gives the logits that each token was taken from.
    assert torch.equal(out[:, 19:], model(out)[:, 18:-1].argmax(-1))


def test_samples_follow_the_model(make_model):
    model, prompt = make_model(), torch.tensor([[5, 9]])
    logits = model(prompt)[0, -1].double()
    sampled = generate(model, prompt.expand(20_000, 2), 1, temperature=1.7, top_k=6)[:, -1]
    likeliest = logits.topk(6).indices
    expected = torch.zeros(61, dtype=torch.float64)
    expected[likeliest] = (logits[likeliest] / 1.7).softmax(-1)
    frequencies = sampled.bincount(minlength=61) / 20_000
    assert set(sampled.unique().tolist()) == set(likeliest.tolist())
    torch.testing.assert_close(frequencies.double(), expected, atol=0.015, rtol=0)  # four standard errors


def test_padding_of_the_vocabulary_is_never_sampled(make_model, tokens):
    out = generate(make_model(), tokens % 7, 40, temperature=50.0, top_k=None, vocab_size=7)
    assert out.max() == 6


def test_prompt_longer_than_the_context_is_cropped(make_model):
    model = make_model(max_context=8)
    prompt = torch.randint(61, (2, 20))
    out = generate(model, prompt, 3, temperature=0)
    assert torch.equal(out[:, :20], prompt)
    assert torch.equal(out[:, 20:], generate(model, prompt[:, -8:], 3, temperature=0)[:, 8:])


def test_seed_decides_and_the_global_generator_is_untouched(make_model, tokens):
    model = make_model()
    state = torch.get_rng_state()
    first = generate(model, tokens, 8, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(generate(model, tokens, 8, seed=3), first)
    assert not torch.equal(generate(model, tokens, 8, seed=4), first)


REFUSED = {
    "at least one token": ((1, 0), {}),
    r"shape \(4,\)": ((4,), {}),
    "new_tokens=-1": ((1, 4), {"new_tokens": -1}),
    "temperature=-0.5": ((1, 4), {"temperature": -0.5}),
    "temperature=nan": ((1, 4), {"temperature": float("nan")}),
    "top_k=0": ((1, 4), {"top_k": 0}),
}


@pytest.mark.parametrize("told", REFUSED)
def test_bad_arguments_are_refused(make_model, told):
    shape, options = REFUSED[told]
    with pytest.raises(ValueError, match=told):
        generate(make_model(), torch.zeros(shape, dtype=torch.int64), **{"new_tokens": 3} | options)
