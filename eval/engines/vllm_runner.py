"""Serves prompts with vLLM and writes down what it drafted: run by vLLM's own Python, which lacks draftsmith.

    python vllm_runner.py JOB.json RESULT.json

JOB: model, speculative_config (null: none), context, temperatures, eos (ids that end an answer), and prompts, each with id,
ids and max_new_tokens. RESULT: version, counters, and per temperature and prompt the output ids and rounds: the drafted ids
of a round and the ids that verification gave (accepted ones, then the target's own), before the end of the answer is cut.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Read the job, answer its prompts at each temperature, write the result."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import vllm
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    repair_temperatures()
    rounds: dict[str, list[dict[str, list[int]]]] = defaultdict(list)
    GPUModelRunner._sample = recording(GPUModelRunner._sample, rounds)
    llm = vllm.LLM(
        job["model"],
        dtype="float32",
        max_model_len=job["context"],
        max_num_seqs=4,
        seed=0,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=job["speculative_config"],
    )
    answers = {str(temperature): answer(llm, job, temperature, rounds) for temperature in job["temperatures"]}
    counters = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    result = {"version": vllm.__version__, "counters": counters, "answers": answers}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def answer(llm: Any, job: dict[str, Any], temperature: float, rounds: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Answer all prompts; return per prompt its id, output ids and rounds."""
    from vllm import SamplingParams

    rounds.clear()
    settings = [
        SamplingParams(
            temperature=temperature,
            max_tokens=prompt["max_new_tokens"],
            # A seed per request: an answer does not depend on what else is in the batch.
            seed=None if temperature == 0 else number,
            stop_token_ids=job["eos"],
            detokenize=False,
        )
        for number, prompt in enumerate(job["prompts"])
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt["ids"]} for prompt in job["prompts"]], settings)
    # vLLM appends letters of its own to the number that the request's output has.
    by_request = {key.split("-")[0]: recorded for key, recorded in rounds.items()}
    return [
        {"id": prompt["id"], "ids": list(output.outputs[0].token_ids), "rounds": by_request[output.request_id]}
        for prompt, output in zip(job["prompts"], outputs, strict=True)
    ]


def recording(sample: Callable[..., Any], rounds: dict[str, list[dict[str, list[int]]]]) -> Callable[..., Any]:
    """Wrap `GPUModelRunner._sample`, which sees the drafts of every request of the batch and what became of them."""

    def recorded(runner: Any, logits: Any, metadata: Any) -> Any:
        output = sample(runner, logits, metadata)
        drafted = [] if metadata is None else metadata.draft_token_ids.tolist()
        counts = [0] * len(runner.input_batch.req_ids) if metadata is None else metadata.num_draft_tokens
        start = 0
        for request, count, row in zip(
            runner.input_batch.req_ids, counts, output.sampled_token_ids.tolist(), strict=True
        ):
            sampled = [token for token in row if 0 <= token < runner.input_batch.vocab_size]
            rounds[request].append({"drafted": drafted[start : start + count], "sampled": sampled})
            start += count
        return output

    return recorded


def repair_temperatures() -> None:
    """Give every drafted token its request's temperature.

    vLLM 0.32.0's CPU kernel writes them into a copy (`_expand_kernel_impl` in utils/cpu_triton_utils.py converts the output
    to int64 first; vllm-project/vllm issue 55005), so that `expand_batch_to_tokens` returns memory that nothing was written
    to, and sampled text no longer follows the target. Its GPU kernel is not concerned. The same in torch:
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        expanded = x.repeat_interleave(counts, output_size=num_tokens)
        return torch.where(expanded == replace_from, replace_to, expanded).to(x.dtype)

    rejection_sampler.expand_batch_to_tokens = expand


if __name__ == "__main__":
    main()
