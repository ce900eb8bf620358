"""The global gradient norm, with one collective, and the same bits in every strategy.

``torch.nn.utils.clip_grad_norm_`` gives the same number, but for the order in which it adds
(``tensor_reductions``). Here the sum of powers is formed over the same W pieces whether a rank
holds one of them or all, and these W sums are added by one kernel, so ``no_shard`` and
``full_shard`` clip alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Label
from shardwise.errors import ConfigError
from shardwise.memory.parameters import Bucket
from shardwise.memory.shard_tensor.tensor_reductions import CHUNK
from shardwise.plan.layout.layout import cut_at_multiples
from shardwise.torch_internals import disable_torch_function, foreach_mul_, foreach_norm, get_grad

DOUBLE = (torch.float64, torch.complex128)
Place = tuple[Bucket, int]  # a parameter's bucket, and its position in ``bucket.params``


def places_of(buckets: Iterable[Bucket]) -> dict[int, Place]:
    """The place of each parameter, by its ``id``, in order."""
    return {id(p): (bucket, at) for bucket in buckets for at, p in enumerate(bucket.params)}


def chosen(places: Mapping[int, Place], parameters: Iterable[Tensor]) -> list[Place]:
    """The places of ``parameters``, each once; ``ConfigError`` if one has none."""
    ids = list(dict.fromkeys(map(id, parameters)))
    if foreign := sum(param not in places for param in ids):
        raise ConfigError(
            f"{foreign} of the {len(ids)} parameters whose gradients are to be clipped are not "
            "those of this sharded model. Pass some of its own, such as model.actor.parameters(), "
            "and clip those of other models by their own handles."
        )
    return [places[param] for param in ids]


def dtype_of(buckets: Iterable[Bucket]) -> torch.dtype:
    """The dtype of a norm of their gradients: fp32, or fp64 if a parameter is."""
    return torch.float64 if any(b.dtypes.sum in DOUBLE for b in buckets) else torch.float32


def clip_gradients(
    places: Collection[Place], comm: Comm, max_norm: float, norm_type: float
) -> Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``.

    Args:
        norm_type: the p of the p-norm; ``inf`` for the largest magnitude.

    Returns:
        The norm before clipping, 0-dim, the same on every rank: fp32, or fp64 if a parameter is.

    Raises:
        ConfigError: ``max_norm`` is below 0, or ``norm_type`` is not above 0.
    """
    if not (norm_type > 0 and max_norm >= 0):
        raise ConfigError(f"max_norm={max_norm} must be at least 0, norm_type={norm_type} above 0.")
    with disable_torch_function():
        parts = (part for place in places for part in _parts(place))
        whole = all(bucket.allocation.whole for bucket, _ in places)
        norm = norm_of(parts, comm, whole, norm_type, dtype_of(bucket for bucket, _ in places))
        grads = (get_grad(bucket.params[index]) for bucket, index in places)
        gradients = [grad for grad in grads if grad is not None]
        if gradients:
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for dtype in {grad.dtype for grad in gradients}:
                some = [g for g in gradients if g.dtype is dtype]
                foreach_mul_(some, scale.to(some[0].device, dtype))
    return norm


def norm_of(
    parts: Iterable[tuple[int, Tensor]],
    comm: Comm,
    whole: bool,
    norm_type: float = 2.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The p-norm of gradients over the ranks of ``comm``. One collective, unless ``whole``.

    Args:
        parts: flat gradients, each with the rank that summed it.
        whole: ``parts`` are those of every rank; otherwise those of peers are left out.

    Returns:
        0-dim of ``dtype``, the same bits on every rank.
    """
    pieces: dict[int, list[Tensor]] = {r: [] for r in (range(comm.size) if whole else [comm.rank])}
    for rank, part in parts:
        if rank in pieces:
            pieces[rank].append(part)
    powers = torch.zeros(comm.size, dtype=dtype, device=comm.device)
    for rank, gradients in pieces.items():
        # A number of the host's goes with the call: ``powers[rank] = …`` would wait for a copy.
        powers[rank].fill_(_power(gradients, norm_type, powers[rank]))
    if not whole:
        comm.all_gather(powers, Label("norm", "gradients")).wait()
    if norm_type == float("inf"):
        return powers.max()
    # One kernel over the same W numbers, so that every strategy rounds alike.
    return powers.sum() ** (1.0 / norm_type)


def _parts(place: Place) -> Iterator[tuple[int, Tensor]]:
    """A gradient, flat, piece by piece, each with the rank that summed it."""
    bucket, index = place
    if (gradient := get_grad(bucket.params[index])) is None:
        return
    flat, spec = gradient.reshape(-1), bucket.spec
    if spec.copies == 1:
        yield spec.rank, flat
        return
    first, last = spec.ranges[index]
    for start, stop in cut_at_multiples(first, last, spec.piece_numel):
        yield spec.summed_by(start), flat[start - first : stop - first]


def _power(gradients: Sequence[Tensor], norm_type: float, zero: Tensor) -> Tensor:
    """Sum of ``|g| ** p`` (for ``inf``: the maximum of ``|g|``), in the dtype of ``zero``."""
    gradients = [grad for grad in gradients if grad.numel()]
    if not gradients:
        return zero
    # Of a complex number its magnitude counts. None is kept in a wide dtype beside the next.
    if gradients[0].is_cpu:
        wide = {True: zero.dtype.to_complex(), False: zero.dtype}
        pieces = (grad.to(wide[grad.is_complex()]).split(CHUNK) for grad in gradients)
        each = [norm for chunks in pieces for norm in foreach_norm(chunks, norm_type)]
    else:
        real = [grad.abs() if grad.is_complex() else grad for grad in gradients]
        each = [*foreach_norm(real, norm_type, dtype=zero.dtype)]
    norms = torch.stack(each)
    return norms.max() if norm_type == float("inf") else (norms**norm_type).sum()
