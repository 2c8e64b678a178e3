"""Training goes as it goes in torch."""

import json
from pathlib import Path

import numpy as np

from pytensor_ml.layers import Input
from pytensor_ml.loss import CrossEntropy
from pytensor_ml.model import Model
from pytensor_ml.models import load_causal_lm
from pytensor_ml.optim import adamw, matrices_except

GOLDEN = Path(__file__).parents[1] / "golden" / "training_llama"


def test_losses_of_20_steps_of_adamw_match_torch():
    network = load_causal_lm(GOLDEN)
    golden = json.loads((GOLDEN / "steps.json").read_text())
    model = Model(network(Input("ids", shape=(None, None), dtype="int64")))
    rule = adamw(
        1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, mask=matrices_except(network.embedding.W)
    )
    step = model.compile_train(rule, CrossEntropy(expect_logits=True))
    losses = [float(step(ids[:, :-1], ids[:, 1:])) for ids in np.array(golden["ids"])]
    np.testing.assert_allclose(losses, golden["losses"], rtol=1e-4)
