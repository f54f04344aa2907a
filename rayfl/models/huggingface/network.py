"""A module of transformers as a network of rayfl: tokens in, logits out, with unchanged parameter names.

Forward hooks leave the module unchanged and add HeteroFL's Scaler after every layer except the output layer, and step
sizes at the end of residual branches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from rayfl.core.axes import CLASSES
from rayfl.models.layers import Step

Sees = Literal["all", "before"]
"""Tokens visible to a token: all of its sequence, or itself and earlier ones."""


class Network(nn.Module):
    """Network: x [B, T] int64, -1 for padding -> logits [B, C] of sequences or [B, T, C] of tokens; with early exits a
    tuple, the first exit's first."""

    def __init__(
        self,
        children: Mapping[str, nn.Module],
        run: Callable[..., Any],
        classes: int,
        *,
        pad: int,
        sees: Sees,
        is_eager: bool,
        depths: Sequence[int] = (),
        has_exits: bool = False,
        has_head: bool = True,
    ):
        """`children`: name -> module used by `run`. `run`: transformers' forward; a bound method, because a module
        would give its parameters second names. `pad`: ID of the padding token. `depths`: number of layers before the
        children "exit1", "exit2", .... `has_head`: whether `run` returns logits."""
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.run, self.classes, self.pad, self.sees, self.is_eager = run, classes, pad, sees, is_eager
        self.depths, self.has_exits, self.has_head = tuple(depths), has_exits, has_head

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        there = x >= 0
        options: dict[str, Any] = {"output_hidden_states": True} if self.depths else {}
        given = self.run(input_ids=torch.where(there, x, self.pad), attention_mask=self._seen(there), **options)
        answers = [
            self.get_submodule(f"exit{number}")(given.hidden_states[depth])
            for number, depth in enumerate(self.depths, start=1)
        ]
        if self.has_head:
            # a vocabulary may have more rows than output tokens
            answers.append(given.logits[..., : self.classes])
        return tuple(answers) if self.has_exits else answers[0]

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], most: int, ends: Sequence[int]) -> list[list[int]]:
        """Return for each prompt the most likely next tokens, one after another: those before the first of `ends`, and
        at most `most`."""
        from transformers import GenerationConfig

        model: Any = getattr(self.run, "__self__")  # noqa: B009
        device = next(tensor.device for tensor in chain(self.parameters(), self.buffers()))
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.pad, device=device)
        seen = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
            seen[row, width - len(prompt) :] = 1
        asked = GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=list(ends), pad_token_id=self.pad)
        asked.use_cache = True
        self.eval()
        found = model.generate(input_ids=ids, attention_mask=seen, generation_config=asked)[:, width:].tolist()
        stops = [next((i for i, token in enumerate(row) if token in ends), len(row)) for row in found]
        return [row[:stop] for row, stop in zip(found, stops, strict=True)]

    def set_submodule(self, target: str, module: nn.Module, strict: bool = False) -> None:
        super().set_submodule(target, module, strict)
        # `run` belongs to transformers' module, which has the same children
        owner = getattr(self.run, "__self__")  # noqa: B009
        owner.set_submodule(target, module, strict)

    def _seen(self, there: torch.Tensor) -> torch.Tensor | None:
        """Return the tokens visible to every token: [B, 1, 1 or T, T]. Transformers uses four dimensions unchanged,
        without reading values, which meta tensors do not have."""
        seen = there[:, None, None]
        if self.sees == "before":
            length = there.shape[1]
            seen = seen & torch.ones(length, length, dtype=torch.bool, device=there.device).tril()
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min) if self.is_eager else seen


def scaled(module: nn.Module, scale: float) -> None:
    """Add HeteroFL's Scaler after every embedding and linear layer except the outputs."""
    for layer in module.modules():
        dims = getattr(layer, "axes", {}).get("weight", ())
        answers = not isinstance(layer, nn.Embedding) and bool(dims) and getattr(dims[0], "name", None) == CLASSES
        if len(dims) == 2 and not answers:
            layer.register_forward_hook(partial(_divided, scale))


def _divided(scale: float, layer: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output / scale if layer.training else output


def stepped(block: nn.Module, branches: Sequence[str]) -> None:
    """Add a step size, "step1", "step2", ..., after each layer that ends a residual branch of a block."""
    for number, path in enumerate(branches, start=1):
        step = Step()
        block.add_module(f"step{number}", step)
        # a partial is copied with the network; a closure would keep the step of the original
        block.get_submodule(path).register_forward_hook(partial(_multiplied, step))


def _multiplied(step: Step, layer: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return step(output)


def renamed(layers: nn.Module, names: Sequence[str]) -> nn.ModuleList:
    """Return a list of layers with the numbers that they have in the whole network."""
    found = nn.ModuleList()
    for name, layer in zip(names, layers.children(), strict=True):
        found.add_module(name, layer)
    return found


def resized(module: nn.Module, path: str, inside: int, outside: int) -> nn.Linear:
    """Replace the linear layer at `path` by one of other sizes, which no configuration can express."""
    old = module.get_submodule(path)
    layer = nn.Linear(inside, outside, bias=getattr(old, "bias", None) is not None)
    module.set_submodule(path, layer)
    return layer


def owners(module: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, nn.Parameter]]]:
    """Yield path, module and own parameters of every module with parameters; tied ones belong to their first owner."""
    first = {name for name, _ in module.named_parameters()}
    for path, part in module.named_modules():
        own = {n: p for n, p in part.named_parameters(recurse=False) if (f"{path}.{n}" if path else n) in first}
        if own:
            yield path, part, own
