"""The few CUDA driver calls that running an engine needs, through ctypes.

`libcuda.so.1` comes with the NVIDIA driver, so this works wherever a GPU works, in any container, without torch or a CUDA package.
TensorRT uses the CUDA runtime, which shares the device's primary context with the driver: memory and streams created here are valid
there. This file needs only numpy; it is copied next to `build_plans.py` in a GPU model repository.

What a stream is given can be recorded as a graph (`Device.record`), which one call launches as a whole: small batches otherwise wait for
the host, which launches a hundred kernels one by one.

Not supported: asynchronous copies and pinned memory. Speed is measured with inputs on the GPU (`Plan.ready`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
LIBRARY = "libcuda.so.1"
THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may do what would disturb a recording."""


class CudaError(RuntimeError):
    """A driver call failed; the message gives the call and the driver's name for the error."""


def load_driver() -> Any | None:
    """Returns the CUDA driver, or None if this machine has none."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def capabilities(driver: Any | None) -> tuple[str, ...]:
    """Returns the compute capability of every GPU, such as "80", in the driver's order; () without a driver or a GPU."""
    if driver is None or driver.cuInit(0) != 0:  # cuInit fails with CUDA_ERROR_NO_DEVICE if the driver finds no GPU
        return ()
    count = ctypes.c_int()
    _check(driver, "cuDeviceGetCount", ctypes.byref(count))
    return tuple(_capability(driver, ordinal) for ordinal in range(count.value))


class Device:
    """One GPU with a stream; makes the GPU's primary context current in this thread.

    Args:
        driver: Result of `load_driver`.
        ordinal: Index of the GPU in the driver's order.
    """

    def __init__(self, driver: Any, ordinal: int = 0) -> None:
        self._driver = driver
        _check(driver, "cuInit", 0)
        self.capability = _capability(driver, ordinal)
        handle, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver, "cuDeviceGet", ctypes.byref(handle), ordinal)
        _check(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        _check(driver, "cuCtxSetCurrent", context)
        _check(driver, "cuStreamCreate", ctypes.byref(stream), 0)
        self._stream = stream
        self._blocks: dict[str, tuple[int, int]] = {}

    @property
    def stream(self) -> int:
        """Handle of the stream; it waits for copies, which run on the default stream."""
        return self._stream.value or 0

    def block(self, name: str, num_bytes: int) -> int:
        """Returns the address of a named GPU buffer of at least `num_bytes`; it is reused across calls and reallocated only to grow."""
        address, size = self._blocks.get(name, (0, 0))
        if size < num_bytes:
            if address:
                _check(self._driver, "cuMemFree_v2", ctypes.c_uint64(address))
            pointer = ctypes.c_uint64()
            _check(self._driver, "cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
            address = pointer.value
            self._blocks[name] = address, num_bytes
        return address

    def wait(self) -> None:
        """Waits for the stream."""
        _check(self._driver, "cuStreamSynchronize", self._stream)

    def record(self, work: Callable[[], None]) -> Graph:
        """Records the launches of `work` as a CUDA graph, without running them.

        Args:
            work: Launches kernels; does not wait, copy or allocate.

        Raises:
            CudaError: Something in it cannot be recorded.
        """
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        _check(self._driver, "cuStreamBeginCapture_v2", self._stream, THREAD_LOCAL)
        try:
            work()
        except BaseException:  # the stream has to leave the recording, which may be spoilt
            self._driver.cuStreamEndCapture(self._stream, ctypes.byref(graph))
            if graph:
                self._driver.cuGraphDestroy(graph)
            raise
        _check(self._driver, "cuStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            _check(self._driver, "cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        finally:
            _check(self._driver, "cuGraphDestroy", graph)
        return Graph(self._driver, executable, self._stream)

    def upload(self, array: NDArray[Any], address: int) -> None:
        """Copies a contiguous array to the GPU."""
        size = ctypes.c_size_t(array.nbytes)
        _check(self._driver, "cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(array.ctypes.data), size)

    def download(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Waits for the stream and copies an array from `address` on the GPU."""
        array = np.empty(shape, dtype)
        self.wait()
        size = ctypes.c_size_t(array.nbytes)
        _check(self._driver, "cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(address), size)
        return array


class Graph:
    """A recorded CUDA graph; made by `Device.record`."""

    def __init__(self, driver: Any, executable: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self._driver, self._executable, self._stream = driver, executable, stream

    def launch(self) -> None:
        """Puts all of it on the stream, with the addresses that it was recorded with."""
        _check(self._driver, "cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Frees it; it cannot be launched any more."""
        _check(self._driver, "cuGraphExecDestroy", self._executable)


def _capability(driver: Any, ordinal: int) -> str:
    device, digits = ctypes.c_int(), []
    _check(driver, "cuDeviceGet", ctypes.byref(device), ordinal)
    for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR):
        value = ctypes.c_int()
        _check(driver, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        digits.append(str(value.value))
    return "".join(digits)


def _check(driver: Any, call: str, *arguments: Any) -> None:
    status = getattr(driver, call)(*arguments)
    if status != 0:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise CudaError(f"{call}: {(name.value or b'unknown').decode()} ({status})")
