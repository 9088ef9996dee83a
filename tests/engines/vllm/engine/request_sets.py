"""The requests of the comparisons: every batch holds cases that could make a drafter fail."""

from __future__ import annotations

from engine_runs import MAX_MODEL_LEN, Request
from tiny_model import corpus
from transformers import PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "values": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 6},
        "kind": {"enum": ["first kind", "second kind"]},
    },
    "required": ["name", "values", "kind"],
    "additionalProperties": False,
}


class Prompts:
    """Passages of the corpus by number and length in tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._ids: list[int] = tokenizer.encode(corpus()[1_000_000:1_200_000])

    def __call__(self, number: int, length: int, said_twice: int = 0) -> list[int]:
        """``length`` tokens, which end with a repeat of the first ``said_twice``."""
        start = number * 977 % (len(self._ids) - MAX_MODEL_LEN)
        passage = self._ids[start : start + length]
        return passage + passage[:said_twice]


def greedy(prompts: Prompts) -> list[Request]:
    """48 requests: chunks, shared prefixes, stops, penalties, ends at max_model_len."""
    requests: list[Request] = []
    shared = prompts(1000, 130)
    for i in range(48):
        prompt = prompts(i, 20 + 53 * i % 330, said_twice=12)
        params = SamplingParams(temperature=0, max_tokens=24 + 7 * i % 60, ignore_eos=True)
        match i % 8:
            case 1:  # until the model's length ends it
                prompt = prompts(i, MAX_MODEL_LEN - 10 - 5 * i % 40)
                params.max_tokens = MAX_MODEL_LEN - len(prompt)
            case 2:
                params.stop = ["\n\n", "self", "return"]
                params.ignore_eos = False
            case 3:
                params.repetition_penalty = 1.3
            case 4:
                params.presence_penalty = 0.7
                params.frequency_penalty = 0.4
            case 5:
                prompt = shared + prompts(i, 15 + i)
            case 6:
                params.stop_token_ids = prompts(i, 40)[30:]
                params.bad_words = ["self"]
        requests.append((prompt, _again(params)))
    return requests


def sampled(prompts: Prompts) -> list[Request]:
    """24 requests, 40 samples: seeds, several samples of one prompt, filters, penalties."""
    requests: list[Request] = []
    for i in range(24):
        params = SamplingParams(
            temperature=(0.2, 0.5, 1.0)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            top_k=(0, 20, 0)[i % 3],
            seed=100 + i,
            n=3 if i % 3 == 1 else 1,
            max_tokens=40,
            ignore_eos=True,
            repetition_penalty=1.2 if i % 5 == 4 else 1.0,
        )
        requests.append((prompts(i, 30 + 41 * i % 200, said_twice=10), params))
    return requests


def structured(prompts: Prompts) -> list[Request]:
    """12 requests with a grammar and four without."""
    kinds = [
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex=r"(abc|abd)( (abc|abd)){4,9}\."),
        StructuredOutputsParams(choice=["one and one and one", "two and two and two and two"]),
        None,
    ]
    requests: list[Request] = []
    for i in range(16):
        params = SamplingParams(temperature=0, max_tokens=70, structured_outputs=kinds[i % 4])
        requests.append((prompts(i, 25 + 31 * i % 150, said_twice=8), params))
    return requests


def logprobs(prompts: Prompts) -> list[Request]:
    """10 requests that ask for log probabilities."""
    return [
        (
            prompts(i, 30 + 29 * i % 150, said_twice=10),
            SamplingParams(
                temperature=0, max_tokens=30, ignore_eos=True, logprobs=i % 4, prompt_logprobs=1
            ),
        )
        for i in range(10)
    ]


def _again(params: SamplingParams) -> SamplingParams:
    """A copy, with the derived fields computed again."""
    names = (
        "temperature max_tokens ignore_eos stop stop_token_ids repetition_penalty presence_penalty "
        "frequency_penalty bad_words"
    )
    return SamplingParams(**{name: getattr(params, name) for name in names.split()})
