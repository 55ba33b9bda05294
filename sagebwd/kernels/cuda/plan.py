"""Plans: what a call launches, worked out once for all calls with the same signature.

A forward or backward is written as a function of :class:`Operand`, tensors without memory. :func:`run` calls
it once for each signature: shapes, strides, alignment, dtypes, device and settings. What it allocates and
launches is written down. Each call then makes one allocation of scratch memory, writes addresses into
arguments that are packed already, and launches.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from sagebwd.interface import AttentionParams, ForwardResult, kernel_set
from sagebwd.kernels.cuda.frames import Frame, Launch, layout_of, packable

#: How many plans are remembered: models and batches have many shapes. A plan takes about 15 KB.
PLANS = 2048
#: An address in a plan: the place of a tensor, counted from 1, and below it an offset in bytes.
OFFSET_BITS = 48
#: Parts of the scratch memory are aligned as PyTorch aligns what it allocates.
ALIGNMENT = 512


class Operand:
    """A tensor of a plan: all that is known of it before a call.

    Has the part of the interface of a tensor that does not look at memory. What :meth:`new_empty` gives is
    scratch memory, unless the plan's function returns it.
    """

    def __init__(
        self,
        plan: Plan,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        dtype: torch.dtype = torch.uint8,
        misalignment: int = 0,
    ) -> None:
        self.plan, self.shape, self.dtype = plan, tuple(shape), dtype
        self.device = plan.device
        self._strides = _contiguous(shape) if strides is None else tuple(strides)
        self._misalignment = misalignment
        self.place = len(plan.operands)
        #: What its memory holds from the start; None: anything.
        self.fill: float | None = None
        #: Whether a call makes a tensor of it, not a part of the scratch memory.
        self.is_tensor = False
        plan.operands.append(self)

    def __len__(self) -> int:
        return self.shape[0]

    def stride(self, axis: int | None = None) -> Any:
        return self._strides if axis is None else self._strides[axis]

    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size(self) -> int:
        """In bytes."""
        return self.numel() * self.dtype.itemsize

    def data_ptr(self) -> int:
        """The place instead of an address; its low bits are those of the address."""
        return (self.place + 1 << OFFSET_BITS) + self._misalignment

    def new_empty(self, shape: Sequence[int] | int, dtype: torch.dtype | None = None) -> Operand:
        shape = (shape,) if isinstance(shape, int) else shape
        return Operand(self.plan, shape, dtype=dtype or self.dtype)

    def part(self, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Operand:
        """A tensor in the memory of this one, ``offset`` bytes behind its begin."""
        part = copy.copy(self)
        part.shape, part._strides, part.dtype = tuple(shape), tuple(strides), dtype
        part._misalignment += offset
        return part

    def new_result(self) -> Operand:
        """Laid out as this tensor, as ``empty_like`` does; (B, N, H, D) in memory if it is a stand-in."""
        if self._strides[3] == 0:
            _, heads, tokens, channels = self.shape
            strides = (tokens * heads * channels, channels, heads * channels, 1)
        else:
            strides = torch.empty_like(torch.empty_strided(self.shape, self._strides, device="meta")).stride()
        return Operand(self.plan, self.shape, strides, self.dtype)

    def fill_(self, value: float) -> None:
        """From the start, whenever this is called."""
        self.fill, self.is_tensor = value, True

    def copy_(self, source: Operand) -> None:
        """After all launches."""
        self.is_tensor = source.is_tensor = True
        self.plan.copies.append((self, source))

    def clone(self, *, memory_format: torch.memory_format) -> Operand:
        """Before all launches."""
        clone = functools.partial(torch.clone, memory_format=memory_format)
        return self.call(lambda x: [clone(x)], [self.shape])[0]

    def call(
        self, function: Callable[[Tensor], Sequence[Tensor]], shapes: Sequence[Sequence[int]]
    ) -> list[Operand]:
        """What ``function`` makes of this tensor before all launches: contiguous, of this dtype."""
        made = [Operand(self.plan, shape, dtype=self.dtype) for shape in shapes]
        self.plan.calls.append((function, self, made))
        return made


class Plan:
    """What a call allocates and launches, in order.

    Calls in several threads may run one plan at once: each takes memory for its arguments out of a pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.operands: list[Operand] = []
        self.calls: list[tuple[Callable[..., Any], Operand, list[Operand]]] = []
        self.copies: list[tuple[Operand, Operand]] = []
        self._launches: list[Launch] = []
        self._values = bytearray()  # of all arguments
        # Operand, offset in it, position among these, type, and launch of each of its addresses.
        self._addresses: list[tuple[Operand, int, int, type, int]] = []
        self._pool: list[Frame] = []  # list.pop and append are atomic

    def launch(self, load: Callable[[], Any], grid: int, threads: int, *arguments: Any) -> None:
        """Launch ``grid`` CTAs of ``threads``; nothing if ``grid`` is 0.

        Tensors and None are passed as pointers, int as 32-bit int, float as fp32, structures by value.

        Args:
            load: gives the kernel, see :func:`sagebwd.kernels.cuda.launch.start_loading`. Called when the
                plan runs for the first time: until then, all that it launches is compiled in threads.

        Raises:
            TypeError: an argument has another type.
        """
        if grid == 0:
            return
        layout = layout_of(tuple(map(type, arguments)))
        values = layout.struct.pack(*map(packable, arguments))
        words, begin = memoryview(values).cast("Q"), len(self._values)
        for position, kind in layout.addresses:
            address = words[position // 8]
            if address >> OFFSET_BITS:  # otherwise null, or an address already
                x = self.operands[(address >> OFFSET_BITS) - 1]
                found = (x, address - x.data_ptr(), begin + position, kind, len(self._launches))
                self._addresses.append(found)
        self._launches.append(Launch(load, grid, threads, begin, layout))
        self._values += values

    def finish(self, inputs: int, results: Sequence[Any], params: AttentionParams | None = None) -> None:
        """Lay out the memory; nothing can be added afterwards.

        Args:
            inputs: how many of the operands, the first, a call gives.
            results: what it returns, None for what this plan has not.
            params: without boundaries, if the results are what :class:`KeptResult` takes.
        """
        given, own = self.operands[:inputs], self.operands[inputs:]
        kept = [x for x in results[1:] if params and x in own and not x.is_tensor]
        for x in results:
            if x is not None:
                x.is_tensor = x not in kept
        computed = [x for _, _, several in self.calls for x in several]
        own = [x for x in own if x not in computed]
        tensors = [x for x in own if x.is_tensor]
        launches_of: dict[Operand, list[int]] = {}
        for x, _, _, _, launch in self._addresses:
            launches_of.setdefault(x, []).append(launch)
        scratch = [x for x in own if x in launches_of and not x.is_tensor and x not in kept]
        parts, size = lay_out([(launches_of[x][0], launches_of[x][-1], x.size) for x in scratch])
        # Where :meth:`run` has the memory of an operand: in which tensor, and from which byte on.
        whole = [*given, *computed, *tensors]
        places = {x: (i, 0) for i, x in enumerate(whole)}
        places |= {x: (len(whole), part) for x, part in zip(scratch, parts, strict=True)}
        ends = [0, *accumulate(x.size + -x.size % ALIGNMENT for x in kept)]
        places |= {x: (len(whole) + 1, begin) for x, begin in zip(kept, ends, strict=False)}
        self._tensors = [(x.shape, x.stride(), x.dtype, x.fill) for x in tensors]
        # Freed when the call returns: what its stream runs next may take it.
        self._tensors.append(((size,), (1,), torch.uint8, None))
        self._calls = [(function, places[x][0]) for function, x, _ in self.calls]
        self._copies = [(places[x][0], places[y][0]) for x, y in self.copies]
        self._results = [places[x][0] for x in results if x is not None and x not in kept]
        if params:
            self._tensors.append(((ends[-1],), (1,), torch.uint8, None))
            self._results.append(len(whole) + 1)
            #: Of each result: which returned tensor has it, None if none, and, if that is the shared one,
            #: what of it: the first byte, shape, strides and dtype.
            parts = {x: (places[x][1], x.shape, x.stride(), x.dtype) for x in kept}
            self.fields = [
                (None if x is None else self._results.index(places[x][0]), parts.get(x)) for x in results
            ]
            self.params, self.kv_sizes = params, given[1].shape[1:3]
        self._pointers, described = [], {}
        for x, offset, position, kind, _ in self._addresses:
            place, part = places[x]
            if kind is ctypes.c_void_p:
                self._pointers.append((position // 8, place, offset + part))
            else:
                described.setdefault((kind, x, place, offset + part), []).append(position)
        self._described = [(*where, kind.describe(x), at) for (kind, x, *where), at in described.items()]
        del self.operands, self.calls, self.copies, self._addresses  # what is kept is above

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The results for these inputs, on torch's current stream. Does not synchronize.

        Raises:
            RuntimeError: a kernel does not compile, or CUDA refuses a launch; with the name of its error.
            TypeError: a kernel has parameters of other sizes than its arguments.
        """
        tensors = [*tensors]
        for function, source in self._calls:
            tensors += function(tensors[source])
        for shape, strides, dtype, fill in self._tensors:
            x = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
            tensors.append(x if fill is None else x.fill_(fill))
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        try:
            frame = self._pool.pop()
        except IndexError:
            frame = Frame(self._values, self._launches)
        words = frame.words
        for word, place, offset in self._pointers:
            words[word] = addresses[place] + offset
        for place, offset, describe, positions in self._described:
            described = describe(addresses[place] + offset)
            for position in positions:
                frame.values[position : position + len(described)] = described
        for start, grid, threads, address in frame.launches:
            start(grid, threads, address)  # which reads the arguments before it returns
        self._pool.append(frame)
        for target, source in self._copies:
            tensors[target].copy_(tensors[source])
        return [tensors[i] for i in self._results]


# --- Functions of operands as functions of tensors ---------------------------------------------------------


class KeptResult:
    """A :class:`ForwardResult` and what else its backward needs, most of it in one tensor.

    To allocate, save and free a tensor takes the host longer than a launch.

    tensors: what to save for the backward, out first.
    """

    def __init__(self, plan: Plan, tensors: Sequence[Tensor]) -> None:
        if tensors[-1].data_ptr() % 16:  # a hook of saved tensors put it among others
            tensors = (*tensors[:-1], tensors[-1].clone())
        self.plan, self.tensors, self.out = plan, tensors, tensors[0]
        self.params, self.kv_sizes = plan.params, plan.kv_sizes

    @property
    def restore(self) -> Callable[[Sequence[Tensor]], KeptResult]:
        """Makes the same result of these tensors; holds none of them."""
        return functools.partial(KeptResult, self.plan)

    def __iter__(self) -> Iterator[Tensor | None]:
        """Of a :class:`ForwardResult` all, then q, k and v, None for what is packed, then boundaries."""
        return _unpacked(self.plan.fields, self.tensors, _part)

    def gradients(self, grad_out: Tensor, grad_lse: Tensor | None) -> list[Tensor]:
        """dq, dk and dv, as of ``backward`` of a kernel set."""
        tensors = (grad_out, grad_lse, *self.tensors)
        return backward_of(self.plan, signature_of(tensors)).run(tensors)


def _unpacked(fields: Sequence[Any], tensors: Sequence[Any], part: Callable[..., Any]) -> Iterator[Any]:
    """What ``Plan.fields`` tells, of tensors or operands."""
    for index, where in fields:
        x = None if index is None else tensors[index]
        yield x if where is None else part(x, *where)


def _part(x: Tensor, begin: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As :meth:`Operand.part`."""
    return x[begin : begin + prod(shape) * dtype.itemsize].view(dtype).as_strided(shape, strides)


def planned_forward(write: Callable[..., ForwardResult]) -> Callable[..., ForwardResult]:
    """``forward`` of a kernel set, from the same function of operands.

    If there will be a backward, its kernels are compiled while the forward runs.
    """

    def write_and_load_ahead(q: Operand, k: Operand, v: Operand, params: AttentionParams) -> ForwardResult:
        if params.pack_for_backward:
            has_documents = params.cu_seqlens is not None
            load_ahead(q.device, q.dtype, q.shape[3], params.with_documents(None, None), has_documents)
        return write(q, k, v, params)

    @functools.wraps(write)
    def forward(
        q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, together: bool = False
    ) -> ForwardResult | KeptResult:
        plan, tensors = prepared(write_and_load_ahead, params, (q, k, v), together)
        results = plan.run(tensors)
        return KeptResult(plan, results) if together else ForwardResult(*results)

    return forward


def planned_backward(write: Callable[..., Sequence[Operand]]) -> Callable[..., tuple[Tensor, ...]]:
    """``backward`` of a kernel set, from the same function of operands."""

    def write_flat(*operands: Any) -> Sequence[Operand]:
        grad_out, q, k, v, grad_lse, *saved, params = operands
        return write(grad_out, q, k, v, ForwardResult(*saved), params, grad_lse)

    @functools.wraps(write)
    def backward(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        saved: ForwardResult,
        params: AttentionParams,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        return tuple(run(write_flat, params, (grad_out, q, k, v, grad_lse, *saved)))

    return backward


def planned_mean(write: Callable[..., Operand]) -> Callable[..., Tensor]:
    """``token_mean`` of a kernel set, from the same function of operands."""

    def write_list(*operands: Any) -> list[Operand]:
        return [write(*operands)]

    return functools.wraps(write)(lambda k, params: run(write_list, params, (k,))[0])


@functools.lru_cache(PLANS)
def load_ahead(
    device: torch.device, dtype: torch.dtype, head_dim: int, params: AttentionParams, has_documents: bool
) -> None:
    """Begin to compile the kernels of a forward and its backward: of any size, for the current device.

    Args:
        params: without boundaries; ``has_documents`` tells whether there will be any.
    """
    kernels, plan = kernel_set(params.kernels), Plan(device)
    q = Operand(plan, (1, 1, 1, head_dim), dtype=dtype)
    if has_documents:
        params = params.with_documents(Operand(plan, (2,), dtype=torch.int32), None)
    # What the decorators above wrap: functions of operands.
    saved = kernels.forward.__wrapped__(q, q, q, params)
    kernels.backward.__wrapped__(saved.out, q, q, q, saved, params, None)


def run(
    write: Callable[..., Sequence[Operand]], params: AttentionParams, tensors: Sequence[Tensor | None]
) -> list[Tensor]:
    """What ``write(*operands, params)`` returns, computed on these tensors, of which the first is never None.

    ``write`` is called once for each signature. It may look at nothing but its arguments.
    """
    plan, tensors = prepared(write, params, tensors)
    return plan.run(tensors)


def signature_of(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """All that plans know of these tensors: shapes, strides, dtypes and addresses modulo 16, or None."""
    return tuple([x if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors])


def prepared(
    write: Callable[..., Sequence[Operand]],
    params: AttentionParams,
    tensors: Sequence[Tensor | None],
    together: bool = False,
) -> tuple[Plan, Sequence[Tensor | None]]:
    """The plan of :func:`run`, and what to run it with. ``together`` is that of :func:`plan_of`."""
    tensors = (*tensors, params.cu_seqlens, params.cu_seqlens_kv)
    params = params.with_documents(None, None)
    return plan_of(write, params, tensors[0].device, signature_of(tensors), together), tensors


@functools.lru_cache(PLANS)
def plan_of(
    write: Callable[..., Sequence[Operand]],
    params: AttentionParams,
    device: torch.device,
    signature: tuple[Any, ...],
    together: bool = False,
) -> Plan:
    """The plan for such tensors. ``together``: of a forward, for :class:`KeptResult`."""
    plan = Plan(device)
    *given, cu_seqlens, cu_seqlens_kv = inputs = _inputs(plan, signature)
    of_call = params.with_documents(cu_seqlens, cu_seqlens_kv)
    made = write(*given, of_call)
    if together:
        made = (*made, *of_call.needed_by_backward(*given), cu_seqlens, cu_seqlens_kv)
    plan.finish(len(inputs), made, params if together else None)
    return plan


@functools.lru_cache(PLANS)
def backward_of(forward: Plan, signature: tuple[Any, ...]) -> Plan:
    """The plan for what :meth:`KeptResult.gradients` takes."""
    plan = Plan(forward.device)
    grad_out, grad_lse, *tensors = inputs = _inputs(plan, signature)
    *result, q, k, v, cu_seqlens, cu_seqlens_kv = _unpacked(forward.fields, tensors, Operand.part)
    # What was packed has dQ's layout, or none.
    q = result[0] if q is None else q
    shape = (grad_out.shape[0], *forward.kv_sizes, grad_out.shape[3])
    stand_in = grad_out.part(0, shape, (0,) * 4, grad_out.dtype)
    k, v = (stand_in if x is None else x for x in (k, v))
    params = forward.params.with_documents(cu_seqlens, cu_seqlens_kv)
    write = kernel_set(params.kernels).backward.__wrapped__
    made = write(grad_out, q, k, v, ForwardResult(*result), params, grad_lse)
    plan.finish(len(inputs), made)
    return plan


def _inputs(plan: Plan, signature: tuple[Any, ...]) -> list[Operand | None]:
    """Operands of what a call gives. What it does not give has a place, too."""
    operands = [Operand(plan, *(known or ((),))) for known in signature]
    return [known and x for known, x in zip(signature, operands, strict=True)]


# --- Memory ------------------------------------------------------------------------------------------------


def lay_out(parts: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Where parts lie in one piece of memory, and how large it is.

    Args:
        parts: first launch, last launch, bytes of each. Two overlap only if one's last launch is before the
            other's first.
    """
    offsets, size = [0] * len(parts), 0
    placed: list[tuple[int, int, int, int]] = []
    for i in sorted(range(len(parts)), key=lambda i: -parts[i][2]):
        first, last, needed = parts[i]
        for begin, end, *_ in sorted(x for x in placed if x[2] <= last and first <= x[3]):
            if begin - offsets[i] >= needed:
                break
            offsets[i] = max(offsets[i], end)
        end = offsets[i] + needed
        placed.append((offsets[i], end + -end % ALIGNMENT, first, last))
        size = max(size, end)
    return offsets, size


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
