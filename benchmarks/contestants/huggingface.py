"""Language models of transformers on torch."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.contestants import TRAINING_STEPS, Task

PACKAGES = ("transformers", "torch")


def decode(inputs, model, capacity, n_tokens):
    """Give tokens after the first, greedily."""
    llm = load(model)
    prompt = torch.from_numpy(inputs["prompt"])[None]
    state, first = {}, []

    @torch.inference_mode()
    def prepare():
        made = llm(input_ids=prompt, use_cache=True, logits_to_keep=1)
        state["token"] = made.logits[:, -1:].argmax(-1)
        state["cache"] = made.past_key_values
        first[:] = [int(state["token"])]

    @torch.inference_mode()
    def run():
        token, cache, tokens = state["token"], state["cache"], []
        for _ in range(n_tokens):
            made = llm(input_ids=token, past_key_values=cache, use_cache=True)
            token = made.logits[:, -1:].argmax(-1)
            tokens.append(int(token))
        return [[*first, *tokens]]

    return Task(run, prepare, n_tokens)


def prefill(inputs, model):
    """Take a prompt and score the token after it."""
    llm = load(model)
    prompt = torch.from_numpy(inputs["prompt"])[None]

    @torch.inference_mode()
    def run():
        return [llm(input_ids=prompt, use_cache=True, logits_to_keep=1).logits[:, -1]]

    return Task(run)


def train_step(inputs, config):
    """Take steps of AdamW and return the loss before the first."""
    llm = LlamaForCausalLM(LlamaConfig(**config)).train()
    weights = {name: torch.from_numpy(value) for name, value in inputs.items() if name != "ids"}
    llm.load_state_dict(weights)
    rule = torch.optim.AdamW(llm.parameters(), lr=1e-3, weight_decay=0.01)
    ids = torch.from_numpy(inputs["ids"])

    def step():
        logits = llm(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        rule.zero_grad()
        loss.backward()
        rule.step()
        return loss.detach()

    return Task(lambda: [step() for _ in range(TRAINING_STEPS)][:1], steps=TRAINING_STEPS)


def load(path):
    folder, name = Path(path).parent, Path(path).name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
