"""Language models compiled by this package."""

import pytensor

from benchmarks.contestants import Task
from pytensor_ml.generation import Decoder, generate
from pytensor_ml.layers import Input
from pytensor_ml.loss import CrossEntropy
from pytensor_ml.model import Model
from pytensor_ml.models import build_model, load_causal_lm
from pytensor_ml.optim import adamw
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


def train_step(inputs, backend, config):
    """Take a step of AdamW and return the loss before it."""
    network, keys = build_model(config)
    keys.load(inputs.__getitem__, keys.keys())
    ids = Input("ids", shape=(None, None), dtype="int64")
    model = Model(network(ids), compile_kwargs={"mode": backend_mode(backend)})
    step = model.compile_train(adamw(1e-3, weight_decay=0.01), CrossEntropy(expect_logits=True))
    batch = inputs["ids"]
    return Task(lambda: [step(batch[:, :-1], batch[:, 1:])])


pytensor.config.floatX = "float32"
