"""Kill processes that overwrite a model, and load it: run by test_pretrained.

Prints what was loaded after each kill, a line each: the value that all parameters hold. It is a
process of its own, since to fork one that has threads is not safe.
"""

import os
import random
import signal
import sys
import time

import numpy as np

from pytensor_ml.layers import Input, Linear, Sequential
from pytensor_ml.pretrained import from_pretrained, save_pretrained
from pytensor_ml.pytensorf import collect_trainable_params


def model(depth):
    """Return a network all of whose parameters hold its number of layers."""
    x = Input("x", shape=(None, 128))
    y = Sequential(*(Linear(f"fc_{i}", n_in=128, n_out=128) for i in range(depth)))(x)
    for parameter in collect_trainable_params(y):
        parameter.set_value(np.full_like(parameter.get_value(), depth))
    return y


def loaded(folder):
    _, y = from_pretrained(folder)
    values = {v for p in collect_trainable_params(y) for v in np.unique(p.get_value())}
    [value] = values
    assert len(collect_trainable_params(y)) == 2 * value
    return int(value)


def in_child(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child


def kill_at_random(folder, models, times):
    rng = random.Random(0)

    def overwrite_forever():
        while True:
            for y in models:
                save_pretrained(y, folder)

    longest = 0.05
    for _ in range(times):
        child = in_child(overwrite_forever)
        time.sleep(rng.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        value = loaded(folder)
        print(value)
        # A child writes 1, then 2, and so on: this makes half of them come to 2, however fast.
        longest *= 1.1 if value == 1 else 0.9


def kill_at_each_step(folder, old, new):
    """Kill at the first, the second, ... use of a file while ``new`` is written over ``old``."""
    step = 0
    while True:
        save_pretrained(old, folder)
        # What a killed process has left is gone, hidden files too.
        files = sorted(os.listdir(folder))
        assert files == ["config.json", "model.safetensors"], files
        step += 1

        def overwrite(step=step):
            seen = 0

            def count(event, _):
                nonlocal seen
                if event == "open" or event.startswith("os."):
                    seen += 1
                    if seen == step:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            save_pretrained(new, folder)

        _, status = os.waitpid(in_child(overwrite), 0)
        print(loaded(folder))
        if status == 0:
            return


if __name__ == "__main__":
    folder, times = sys.argv[1], int(sys.argv[2])
    models = [model(1), model(2)]
    save_pretrained(models[0], folder)
    kill_at_random(folder, list(models), times)
    print("steps")
    kill_at_each_step(folder, *models)
