"""Language models compiled by this package."""

import pytensor

from benchmarks.contestants import Task
from pytensor_ml.generation import Decoder, generate
from pytensor_ml.models import load_causal_lm
from pytensor_ml.pytensorf import backend_mode

PACKAGES = ("pytensor_ml", "pytensor")


def decode(inputs, backend, model, capacity, n_tokens):
    """Give tokens after the first, greedily."""
    decoder = Decoder(load_causal_lm(model), capacity=capacity, mode=backend_mode(backend))
    prompt, tokens, first = [inputs["prompt"].tolist()], iter(()), []

    def prepare():
        nonlocal tokens
        tokens = generate(decoder, prompt, max_new_tokens=n_tokens + 1)
        first[:] = next(tokens)

    return Task(lambda: [[*first, *(int(token) for [token] in tokens)]], prepare, n_tokens)


def prefill(inputs, backend, model):
    """Take a prompt and score the token after it."""
    prompt = [inputs["prompt"].tolist()]
    decoder = Decoder(load_causal_lm(model), capacity=len(prompt[0]), mode=backend_mode(backend))
    return Task(lambda: [decoder.begin(prompt)])


pytensor.config.floatX = "float32"
