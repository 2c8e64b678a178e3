"""Language models compiled by this package."""

import pytensor

from benchmarks.contestants import TRAINING_STEPS, Task
from pytensor_ml.generation import Decoder, generate
from pytensor_ml.layers import Input
from pytensor_ml.loss import CrossEntropy
from pytensor_ml.model import Model
from pytensor_ml.models import build_model, halve_weights, load_causal_lm
from pytensor_ml.optim import adamw
from pytensor_ml.pytensorf import backend_mode

PACKAGES = ("pytensor_ml", "pytensor")


def decode(inputs, backend, model, capacity, n_tokens, halved=False):
    """Give tokens after the first, greedily."""
    causal_lm = load_causal_lm(model)
    if halved:
        halve_weights(causal_lm)
    decoder = Decoder(causal_lm, capacity=capacity, mode=backend_mode(backend))
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
    """Take steps of AdamW and return the loss before the first."""
    network, keys = build_model(config)
    keys.load(inputs.__getitem__, keys.keys())
    ids = Input("ids", shape=(None, None), dtype="int64")
    model = Model(network(ids), compile_kwargs={"mode": backend_mode(backend)})
    step = model.compile_train(adamw(1e-3, weight_decay=0.01), CrossEntropy(expect_logits=True))
    batch = inputs["ids"]

    def run():
        return [step(batch[:, :-1], batch[:, 1:]) for _ in range(TRAINING_STEPS)][:1]

    return Task(run, steps=TRAINING_STEPS)


pytensor.config.floatX = "float32"
