"""Extraction: the frozen target computes hidden states, into a store or on demand.

Shapes: B rows of one forward pass, n its tokens, R real tokens, L tokens of a sample, A aux layers,
Ht target hidden size, V target vocab.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor, distributed

from draftsmith.data.batch import CHUNK_BATCHES, Features, States, Tokenized, plan_passes
from draftsmith.data.features.behind import Behind, HostCopies
from draftsmith.data.features.index import INDEX_NAME, StoredSamples, StoreSpec, is_complete, parse_dtype, read_index
from draftsmith.data.features.store import FeatureStore, check_disk_space, estimate_bytes, readable_bytes
from draftsmith.data.features.writing import SHARD_BYTES, FeatureWriter, Rows, begin_store, rows_of
from draftsmith.data.memory import map_tensors
from draftsmith.data.team import Alone, SharedBar, Team
from draftsmith.errors import UserError, first_line
from draftsmith.progress import Bar, say
from draftsmith.target.layers import sharers_of
from draftsmith.target.target import Target, TargetHead, describe_context

BATCH_TOKENS = 2048
# The full-vocabulary logits are made in pieces of this many bytes: what stays in a CPU's cache (twice as fast as
# 128 MiB there), or what keeps a GPU busy; at least LOGITS_ROWS rows, so that the weights are not read too often.
LOGITS_BYTES = {"cpu": 8 * 2**20, "gpu": 256 * 2**20}
LOGITS_ROWS = 64


def extract(
    target: Target,
    samples: Sequence[Tokenized],
    path: Path | str,
    *,
    layer_ids: Sequence[int],
    dtype: str = "auto",
    batch_tokens: int = BATCH_TOKENS,
    shard_bytes: int = SHARD_BYTES,
    kept: Path | None = None,
    team: Team | None = None,
) -> FeatureStore:
    """Run `target` over `samples` and return the store at `path`; continues where an earlier run stopped.

    layer_ids: aux layers to store, a superset of what any head will need. dtype: of the stored states, "auto" takes
    the target's. batch_tokens: tokens of one forward pass, padding included (a longer sample runs alone).
    The files are the same whether or not the run was interrupted, and for any number of processes, for the same batch_tokens and
    kind of machine, unless a device was short of memory and took a pass in halves. kept: an earlier store, taken where sample and target are the same. team: the processes that share the work; all but
    rank 0 read the samples from the store, and may leave them out.
    Raises UserError for bad layers, too long samples, too little disk space, or a store made from something else.
    """
    path, team = Path(path), team or Alone()
    begin = partial(_begin, target, samples, path, tuple(layer_ids), dtype, batch_tokens, shard_bytes)
    team.tell(begin)
    writer = FeatureWriter(path)
    # As one process finds it: others write meanwhile, and processes that share a target make the same passes.
    missing = set(team.tell(lambda: [number for number in range(len(writer.shards)) if not writer.has(number)]))
    lengths = writer.samples.lengths
    total, left = sum(lengths), sum(lengths[i] for number in missing for i in writer.shards[number])
    with Bar(total=total, initial=total - left, unit="tok", unit_scale=True, desc="extract") as bar:
        shown = SharedBar(team, f"tokens in {path}", bar)
        # In memory are the samples of a shard that are still to be written, and CHUNK_BATCHES passes at most.
        with Behind(CHUNK_BATCHES) as behind:
            passes = _Passes(target, writer.spec, writer.samples, _Earlier(kept, writer.spec), behind)
            for number, (chunks, shards) in enumerate(writer.shares):
                own = [shard for shard in shards if shard in missing]
                if number % team.size != team.rank or not own:
                    continue
                # A chunk that was interrupted is computed again as a whole: the same batches give the same bits.
                wanted = {i for shard in own for i in writer.shards[shard]}
                rows: dict[int, Rows] = {}
                for batch in (batch for chunk in chunks for batch in chunk.batches):
                    passes.run(batch, rows)
                    behind.put(partial(shown.update, sum(lengths[i] for i in wanted.intersection(batch))))
                    behind.put(partial(_write, writer, rows, own, team))
        if team.writes and team.rank == 0:
            shown.wait(writer.merge)
            writer.finish()
    team.wait(lambda: is_complete(path))
    return FeatureStore(path, fingerprint=target.fingerprint)


def _begin(
    target: Target,
    samples: Sequence[Tokenized],
    path: Path,
    layer_ids: tuple[int, ...],
    dtype: str,
    batch_tokens: int,
    shard_bytes: int,
) -> None:
    """Check what is to be extracted, and make the store or get it ready to go on."""
    check_samples(target, samples)
    if layer_ids:  # none for heads that read the last hidden state alone
        target.check_layer_ids(layer_ids)
    spec = StoreSpec(
        fingerprint=target.fingerprint,
        compute_dtype=target.dtype_name,
        layer_ids=layer_ids,
        dtype=target.dtype_name if dtype == "auto" else dtype,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        samples=digest_samples(samples),
        shard_bytes=shard_bytes,
        batch_tokens=batch_tokens,
        slices=tuple(sorted({sample.slice for sample in samples})),
    )
    tokens = sum(len(sample.ids) for sample in samples)
    size = estimate_bytes(tokens, spec.hidden_size, len(layer_ids), spec.dtype)
    say(f"Features of {len(samples)} samples, {tokens} tokens: {readable_bytes(size)} in {path}")
    check_disk_space(path, size - sum(file.stat().st_size for file in path.glob("shard-*.safetensors")))
    begin_store(path, spec, samples)


class _Passes:
    """Forward passes whose states go to the thread `behind` them, as rows of shards."""

    def __init__(
        self, target: Target, spec: StoreSpec, samples: StoredSamples, earlier: "_Earlier", behind: Behind
    ) -> None:
        self._target, self._spec, self._samples, self._earlier, self._behind = target, spec, samples, earlier, behind
        self._copies = HostCopies(target.device)

    def run(self, batch: Sequence[int], rows: dict[int, Rows]) -> None:
        """Run one pass, and have the rows of its samples added to `rows`."""
        spec, samples = self._spec, {i: self._samples[i] for i in batch}
        known = {i: rows_of(found, spec) for i in batch if (found := self._earlier.get(samples[i])) is not None}
        missing = {i: sample for i, sample in samples.items() if i not in known}
        self._behind.put(partial(rows.update, known))
        if missing:
            self._compute(missing, rows)

    def _compute(self, samples: dict[int, Tokenized], rows: dict[int, Rows]) -> None:
        """Run the target over samples, in halves where its device has not the memory for all of them."""
        # In a function of its own: what a pass that failed had made is freed before its halves begin.
        if (copies := self._run_whole(samples)) is not None:
            self._behind.put(partial(_receive, rows, samples, *copies))
            return
        say(
            f"warning: {self._target.device} has not the memory for passes of features.batch_tokens: {self._spec.batch_tokens}, and takes "
            "some in halves, which is slower; lower it for the next store."
        )
        if self._target.device.type == "cuda":
            torch.cuda.empty_cache()
        numbered, few = list(samples.items()), len(samples) // 2
        for part in (numbered[:few], numbered[few:]):
            self._compute(dict(part), rows)

    def _run_whole(self, samples: dict[int, Tokenized]) -> tuple[Rows, Callable[[], None]] | None:
        """Return the states of one pass on their way to the CPU; None where the device has not the memory for several samples."""
        layer_ids, dtype = self._spec.layer_ids, self._spec.torch_dtype
        try:
            states = compute_states(self._target, list(samples.values()), layer_ids, dtype)
            return self._copies.begin(by_tensor(states, layer_ids))
        except torch.OutOfMemoryError as error:
            if len(samples) > 1 and sharers_of(self._target.model) is None:
                return None
            if len(samples) > 1:  # others compute this pass, too
                raise UserError(
                    f"{self._target.device} has not the memory for a pass of features.batch_tokens: {self._spec.batch_tokens} "
                    f"({first_line(error)[:200]}), which processes that share a target do not take in halves: lower it."
                ) from error
            (sample,) = samples.values()
            raise UserError(
                f"{self._target.device} has not the memory for a pass over the {len(sample.ids)} tokens of {sample.sample_id!r} "
                f"({first_line(error)[:200]}): lower data.max_length, or take a device with more."
            ) from error


def by_tensor(states: States, layer_ids: Sequence[int]) -> Rows:
    """Return the states of a pass as the tensors of a shard, where they were computed."""
    streams = states.aux.chunk(len(layer_ids), dim=-1) if layer_ids else ()
    rows = {"last": states.last, "top1": states.top1, "logsumexp": states.logsumexp}
    return rows | {f"aux.{k}": stream.contiguous() for k, stream in zip(layer_ids, streams, strict=True)}


def _receive(rows: dict[int, Rows], samples: dict[int, Tokenized], states: Rows, wait: Callable[[], None]) -> None:
    """Add to `rows` those of the samples of one pass, as soon as their states are in memory."""
    wait()
    lengths = [len(sample.ids) for sample in samples.values()]
    parts = {name: tensor.split(lengths) for name, tensor in states.items()}
    for at, (number, sample) in enumerate(samples.items()):
        own = {"ids": sample.ids.int(), "mask": sample.mask.bool()}
        rows[number] = own | {name: part[at] for name, part in parts.items()}


def _write(writer: FeatureWriter, rows: dict[int, Rows], left: list[int], team: Team) -> None:
    """Write those of the shards that are left for which all samples have come."""
    for number in [shard for shard in left if all(i in rows for i in writer.shards[shard])]:
        made = [rows.pop(i) for i in writer.shards[number]]
        if team.writes:
            writer.write(number, made)
        left.remove(number)
        if team.writes and team.rank == 0:
            writer.merge()


class _Earlier:
    """Features of an earlier list of samples, for those samples of a new one that are the same."""

    def __init__(self, path: Path | None, spec: StoreSpec) -> None:
        """path: None for none. spec: of the new store; another target's, dtype's or a store without its layers is left alone."""
        self._store: FeatureStore | None = None
        index = None
        try:
            index = None if path is None or not (path / INDEX_NAME).exists() else read_index(path)
        except UserError as error:  # of an earlier version of draftsmith, or damaged
            say(f"features: nothing is taken from the earlier store ({str(error).rstrip('.')})")
        if path is not None and index is not None:
            alike = ("fingerprint", "compute_dtype", "dtype", "hidden_size", "vocab_size")
            same = all(getattr(index.spec, name) == getattr(spec, name) for name in alike)
            if same and set(spec.layer_ids) <= set(index.spec.layer_ids):
                self._store = FeatureStore(path, part=True)
        named = () if self._store is None else enumerate(self._store.ids[: self._store.done])
        self._places = {name: place for place, name in named}
        self._layer_ids = spec.layer_ids

    def get(self, sample: Tokenized) -> Features | None:
        """Return the features of a sample with this id and these tokens and mask; None where there are none."""
        index = self._places.get(sample.sample_id)
        if self._store is None or index is None or self._store.lengths[index] != len(sample.ids):
            return None
        stored = self._store.get(index, self._layer_ids)
        same = torch.equal(stored.ids, sample.ids.long()) and torch.equal(stored.mask, sample.mask.bool())
        return replace(stored, slice=sample.slice) if same else None


class OnlineSource:
    """Features as training asks for them, computed by the target whenever they are.

    layer_ids: what heads will ask for. dtype: what the states are rounded to, as in a store; "auto" takes the target's.
    """

    def __init__(
        self,
        target: Target,
        samples: Sequence[Tokenized],
        layer_ids: Sequence[int],
        *,
        dtype: str = "auto",
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        check_samples(target, samples)
        if layer_ids:
            target.check_layer_ids(tuple(layer_ids))
        self.slices = [sample.slice for sample in samples]
        self.lengths = [len(sample.ids) for sample in samples]
        self.shards = None
        self.dtype = target.dtype if dtype == "auto" else parse_dtype(dtype)
        self.hidden_size, self.computed_on = target.hidden_size, target.device
        self._target, self._samples, self._batch_tokens = target, samples, batch_tokens

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """Return ids [L] int64 and mask [L] bool of a sample."""
        sample = self._samples[index]
        return sample.ids.long(), sample.mask.bool()

    def fill(self, indices: Sequence[int], places: Sequence[States], layer_ids: Sequence[int]) -> None:
        """Compute the states of samples into their places, in as few forward passes as batch_tokens allows.

        Processes that share the target call it together, each with samples of its own, or none: all of them compute the passes of
        each in turn. So the head's work is divided as ever, and the target's passes are those of one process.
        """
        sharers, asked, own_turn = sharers_of(self._target.model), [list(indices)], 0
        if sharers is not None:
            asked, own_turn = asked * sharers.size(), sharers.rank()
            distributed.all_gather_object(asked, list(indices), group=sharers)
        for turn, numbers in enumerate(asked):
            self._compute(numbers, places if turn == own_turn else None, layer_ids)

    def _compute(self, indices: list[int], places: Sequence[States] | None, layer_ids: Sequence[int]) -> None:
        """Compute the states of samples into their places; None for those of another process."""
        for batch in plan_passes([self.lengths[i] for i in indices], self._batch_tokens):
            samples = [self._samples[indices[at]] for at in batch]
            states, start = compute_states(self._target, samples, tuple(layer_ids), self.dtype), 0
            if places is None:
                continue
            for at, sample in zip(batch, samples, strict=True):
                own = slice(start, start + len(sample.ids))
                places[at].copy_(map_tensors(itemgetter(own), states))
                start = own.stop


@torch.no_grad()
def compute_states(
    target: Target, samples: Sequence[Tokenized], layer_ids: tuple[int, ...], dtype: torch.dtype
) -> States:
    """Run one right-padded batch and return the states of its samples, on the target's device.

    No attention mask and no position ids are needed: in a causal model (checked at load) a token never sees the
    padding after it, and positions count from 0. aux and last are rounded to `dtype`; top1 and logsumexp are those
    of the rounded states, so that exp(logits - logsumexp) in training is a probability.
    """
    longest = max(len(sample.ids) for sample in samples)
    ids, kept = torch.zeros(len(samples), longest, dtype=torch.int64), []
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = sample.ids
        kept.append(torch.arange(len(sample.ids)) + row * longest)
    output = target.forward(_upload(ids, target.device), layer_ids=layer_ids)
    # By numbers, as the device would have to be asked how many True a mask has.
    real = _upload(torch.cat(kept), target.device)
    aux, last = (states.flatten(0, 1)[real].to(dtype) for states in (output.aux, output.last))
    if dtype == torch.float16 and not bool(last.isfinite().all() & aux.isfinite().all()):
        names = ", ".join(sample.sample_id for sample in samples[:3])
        raise UserError(
            f"features.dtype is float16, but the target has states beyond its largest number, 65,504, in one of the samples {names}"
            f"{', ...' if len(samples) > 3 else ''}: take bfloat16."
        )
    return States(aux, last, *summarise_logits(target.head, last))


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device that the host does not wait for."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def compute_features(
    target: Target, samples: Sequence[Tokenized], layer_ids: tuple[int, ...], dtype: torch.dtype
) -> list[Features]:
    """Run one right-padded batch, as `compute_states` does, and return the features of its samples, on the CPU."""
    states, lengths = compute_states(target, samples, layer_ids, dtype), [len(sample.ids) for sample in samples]
    parts = (tensor.cpu().split(lengths) for tensor in (states.aux, states.last, states.top1, states.logsumexp))
    return [
        Features(
            ids=sample.ids.long().cpu(),
            mask=sample.mask.bool().cpu(),
            aux=aux,
            last=last,
            top1=top1,
            logsumexp=logsumexp,
            sample_id=sample.sample_id,
            slice=sample.slice,
        )
        for sample, aux, last, top1, logsumexp in zip(samples, *parts, strict=True)
    ]


@torch.no_grad()
def summarise_logits(head: TargetHead, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the argmax [R] int32 and the log-sum-exp [R] float32 of the full-vocabulary logits of last [R, Ht], some rows at a time
    so that [R, V] never exists."""
    piece = LOGITS_BYTES["cpu" if last.device.type == "cpu" else "gpu"]
    rows = max(LOGITS_ROWS, piece // (4 * head.vocab_size))
    top1, logsumexp = [], []
    for part in last.split(rows):
        logits = head.logits(part)
        top1.append(logits.argmax(dim=-1).to(torch.int32))
        logsumexp.append(logits.logsumexp(dim=-1))
    return torch.cat(top1), torch.cat(logsumexp)


def digest_samples(samples: Sequence[Tokenized]) -> str:
    """Return 16 hex digits that name a list of samples: ids, masks, names and order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.sample_id, sample.slice, len(sample.ids)]).encode())
        digest.update(sample.ids.to(torch.int64).cpu().numpy().tobytes())
        digest.update(sample.mask.to(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def check_samples(target: Target, samples: Sequence[Tokenized]) -> None:
    """Raise UserError for no samples, an empty or too long one, or ids that the target does not know."""
    if not samples:
        raise UserError("There are no samples to extract features from: check the conversations and their filters.")
    rows = target.embedding.shape[0]
    for sample in samples:
        length = len(sample.ids)
        if not 0 < length <= target.context_length:
            raise UserError(
                f"Sample {sample.sample_id!r} has {length} tokens, the target {target.path} reads 1 to "
                f"{describe_context(target.config)}: truncate the samples to its context."
            )
        low, high = int(sample.ids.min()), int(sample.ids.max())
        if low < 0 or high >= rows:
            raise UserError(
                f"Sample {sample.sample_id!r} has token id {low if low < 0 else high}, the target {target.path} knows "
                f"0 to {rows - 1}: the samples were made with another tokenizer."
            )
