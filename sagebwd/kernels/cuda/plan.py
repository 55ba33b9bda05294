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
            strides = _strides_like(self.shape, self._strides)
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

    def finish(self, inputs: int, results: Sequence[Operand], *, together: bool = False) -> None:
        """Lay out the memory; nothing can be added afterwards.

        Args:
            inputs: how many of the operands, the first, a call gives.
            results: what it returns.
            together: whether what it returns is what :class:`KeptResult` takes.
        """
        kept = [x for x in results[1:] if together and not x.is_tensor]
        for x in results:
            x.is_tensor = x not in kept
        computed = [x for _, _, several in self.calls for x in several]
        own = [x for x in self.operands[inputs:] if x not in computed]
        tensors = [x for x in own if x.is_tensor]
        launches_of: dict[Operand, list[int]] = {}
        for x, _, _, _, launch in self._addresses:
            launches_of.setdefault(x, []).append(launch)
        scratch = [x for x in own if x in launches_of and not x.is_tensor and x not in kept]
        parts, self._scratch = lay_out([(launches_of[x][0], launches_of[x][-1], x.size) for x in scratch])
        # Where :meth:`run` has the memory of an operand: in which tensor, and from which byte on.
        whole = [*self.operands[:inputs], *computed, *tensors]
        places = {x: (i, 0) for i, x in enumerate(whole)}
        places |= {x: (len(whole), part) for x, part in zip(scratch, parts, strict=True)}
        ends = [0, *accumulate(x.size + -x.size % ALIGNMENT for x in kept)]
        places |= {x: (len(whole) + 1, begin) for x, begin in zip(kept, ends, strict=False)}
        self._kept = ends[-1] if together else None
        self._tensors = [(x.shape, x.stride(), x.dtype, x.fill) for x in tensors]
        self._calls = [(function, places[x][0]) for function, x, _ in self.calls]
        self._copies = [(places[x][0], places[y][0]) for x, y in self.copies]
        self._results = [places[x][0] for x in results if x not in kept]
        if together:
            self._results.append(len(whole) + 1)
            #: Of each result: which returned tensor has it and, if that is the shared one, what of it: the
            #: first byte, shape, strides and dtype.
            self.fields = [
                (
                    self._results.index(places[x][0]),
                    (places[x][1], x.shape, x.stride(), x.dtype) if x in kept else None,
                )
                for x in results
            ]
            self.input_shapes = [x.shape for x in self.operands[:inputs]]
        self._pointers, self._described = [], []
        for x, offset, position, kind, _ in self._addresses:
            place, part = places[x]
            if kind is ctypes.c_void_p:
                self._pointers.append((position // 8, place, offset + part))
            else:
                self._described.append((position, place, offset + part, kind.describe(x)))
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
        # Freed when this returns: what this stream runs next may take it.
        tensors.append(torch.empty(self._scratch, dtype=torch.uint8, device=self.device))
        if self._kept is not None:
            tensors.append(torch.empty(self._kept, dtype=torch.uint8, device=self.device))
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        try:
            frame = self._pool.pop()
        except IndexError:
            frame = Frame(self._values, self._launches)
        words = frame.words
        for word, place, offset in self._pointers:
            words[word] = addresses[place] + offset
        for position, place, offset, describe in self._described:
            described = describe(addresses[place] + offset)
            frame.values[position : position + len(described)] = described
        for start, grid, threads, address in frame.launches:
            start(grid, threads, address)  # which reads the arguments before it returns
        self._pool.append(frame)
        for target, source in self._copies:
            tensors[target].copy_(tensors[source])
        return [tensors[i] for i in self._results]


# --- Functions of operands as functions of tensors ---------------------------------------------------------


class KeptResult:
    """A :class:`ForwardResult` most of whose tensors lie in one; iterating makes views of it.

    To allocate, save and free a tensor takes the host longer than a launch.
    """

    def __init__(self, plan: Plan, *tensors: Tensor) -> None:
        *whole, shared = tensors
        if shared.data_ptr() % 16:  # a hook of saved tensors put it among others
            shared = shared.clone()
        self.plan, self.tensors = plan, (*whole, shared)

    @property
    def restore(self) -> Callable[..., KeptResult]:
        """As of :class:`ForwardResult`."""
        return functools.partial(KeptResult, self.plan)

    @property
    def out(self) -> Tensor:
        return self.tensors[0]

    def __iter__(self) -> Iterator[Tensor]:
        for index, part in self.plan.fields:
            x = self.tensors[index]
            if part is not None:
                begin, shape, strides, dtype = part
                x = x[begin : begin + prod(shape) * dtype.itemsize].view(dtype).as_strided(shape, strides)
            yield x


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
        q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, *, together: bool = False
    ) -> ForwardResult | KeptResult:
        plan, tensors = prepared(write_and_load_ahead, params, (q, k, v), together=together)
        results = plan.run(tensors)
        return KeptResult(plan, *results) if together else ForwardResult(*results)

    return forward


def planned_backward(write: Callable[..., Sequence[Operand]]) -> Callable[..., tuple[Tensor, ...]]:
    """``backward`` of a kernel set, from the same function of operands."""

    def write_flat(*operands: Any) -> Sequence[Operand]:
        grad_out, q, k, v, grad_lse, *saved, params = operands
        return write(grad_out, q, k, v, ForwardResult(*saved), params, grad_lse)

    def write_kept(*operands: Any, forward: Plan) -> Sequence[Operand]:
        grad_out, *qkv, grad_lse = operands[:5]
        tensors = [(operands[5 + index], part) for index, part in forward.fields]
        saved = [x if part is None else x.part(*part) for x, part in tensors]
        for i, shape in enumerate(forward.input_shapes[:3]):
            if qkv[i] is None:  # it was packed: of dQ's layout, or of none
                qkv[i] = saved[0] if i == 0 else grad_out.part(0, shape, (0,) * 4, grad_out.dtype)
        return write(grad_out, *qkv, ForwardResult(*saved), operands[-1], grad_lse)

    @functools.wraps(write)
    def backward(
        grad_out: Tensor,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        saved: ForwardResult | KeptResult,
        params: AttentionParams,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        tensors = (grad_out, q, k, v, grad_lse, *saved.tensors)
        if isinstance(saved, KeptResult):
            plan, tensors = prepared(write_kept, params, tensors, forward=saved.plan)
        else:
            plan, tensors = prepared(write_flat, params, tensors)
        return tuple(plan.run(tensors))

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


def prepared(
    write: Callable[..., Sequence[Operand]],
    params: AttentionParams,
    tensors: Sequence[Tensor | None],
    **options: Any,
) -> tuple[Plan, Sequence[Tensor | None]]:
    """The plan of :func:`run`, and what to run it with. Options are those of :func:`plan_of`."""
    tensors = (*tensors, params.cu_seqlens, params.cu_seqlens_kv)
    known = tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors])
    return plan_of(write, params.with_documents(None, None), tensors[0].device, known, **options), tensors


@functools.lru_cache(PLANS)
def plan_of(
    write: Callable[..., Sequence[Operand]],
    params: AttentionParams,
    device: torch.device,
    signature: tuple[tuple[Any, ...] | None, ...],
    *,
    together: bool = False,
    **named: Plan,
) -> Plan:
    """The plan for tensors with these shapes, strides, dtypes and addresses modulo 16, or None.

    Args:
        together: as of :meth:`Plan.finish`.
        named: for ``write``.
    """
    plan = Plan(device)
    inputs = [Operand(plan, *(known or ((),))) for known in signature]
    *given, cu_seqlens, cu_seqlens_kv = (known and x for known, x in zip(signature, inputs, strict=True))
    made = write(*given, params.with_documents(cu_seqlens, cu_seqlens_kv), **named)
    plan.finish(len(inputs), made, together=together)
    return plan


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


def _strides_like(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Those of ``empty_like``: the same, if the memory has no gaps."""
    size = 1
    for stride, n in sorted(x for x in zip(strides, shape, strict=True) if x[1] > 1):
        if stride != size:
            break
        size *= n
    if size == prod(shape):
        return strides
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
