"""The kernel, compiled for the device by NVRTC, and its launch, both through ``cuda.bindings``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from topkv_cuda_topk.shapes import Shape, ranks

INSTALL = "pip install cuda-bindings, and nvidia-cuda-nvrtc where torch brought none"

CAPABILITY = (9, 0)
"""First compute capability with clusters."""

VERSION = (12, 9)
"""First NVRTC that is taken: fences of shared memory alone came shortly before."""

SOURCE = "topk.cu"
ARGUMENTS = (*[ctypes.c_void_p] * 3, *[ctypes.c_longlong] * 2, *[ctypes.c_int] * 4)


@frozen
class Libraries:
    """The modules of ``cuda.bindings``.

    Attributes:
        driver, nvrtc: the modules.
        name: the distribution and its version, and that of NVRTC.
    """

    driver: Any
    nvrtc: Any
    name: str


@cache
def find() -> tuple[Libraries | None, list[str]]:
    """Return the libraries, None where anything is missing; and what was tried and lacks what."""
    try:
        driver = import_module("cuda.bindings.driver")
        nvrtc = import_module("cuda.bindings.nvrtc")
        major, minor = taken(nvrtc.nvrtcVersion(), nvrtc)
    except (ImportError, OSError, RuntimeError) as error:
        said = str(error).splitlines() or ["no reason given"]
        return None, [f"cuda.bindings: {type(error).__name__}: {said[0]}"]
    try:
        bindings = version("cuda-bindings")
    except PackageNotFoundError:
        bindings = "of no version"
    name = f"cuda-bindings {bindings}, NVRTC {major}.{minor}"
    if (major, minor) < VERSION:
        return None, [f"{name}: NVRTC must be {VERSION[0]}.{VERSION[1]} or later"]
    return Libraries(driver, nvrtc, name), []


def describe() -> list[str]:
    """Return the libraries that are usable here, or what is missing, for ``topkv doctor``."""
    libraries, tried = find()
    return [f"ok, {libraries.name}" if libraries else f"{'; '.join(tried)}; {INSTALL}"]


def taken(answer: Sequence[Any], module: Any) -> Any:
    """Return the values of ``answer``, which a call of ``module`` of ``cuda.bindings`` gave.

    Raises:
        RuntimeError: the call failed, with the library's word for it.
    """
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"{module.__name__}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _libraries() -> Libraries:
    libraries, tried = find()
    if libraries is None:
        raise RuntimeError(f"cuda top-k: {'; '.join(tried)}; {INSTALL}")
    return libraries


def compile_for(shape: Shape, architecture: str) -> bytes:
    """Machine code of the kernel for a shape.

    Args:
        shape: what it is made for.
        architecture: of the device, ``"sm_90"`` say.

    Raises:
        RuntimeError: the compiler refused, with its log.
    """
    nvrtc, folder = _libraries().nvrtc, files(__package__)
    headers = {path.name: path for path in folder.iterdir() if path.name.endswith(".cuh")}
    program = taken(
        nvrtc.nvrtcCreateProgram(
            *((folder / SOURCE).read_bytes(), SOURCE.encode(), len(headers)),
            [path.read_bytes() for path in headers.values()],
            [name.encode() for name in headers],
        ),
        nvrtc,
    )
    options = [f"-arch={architecture}", "-std=c++17", "-default-device", *shape.definitions]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(status) != 0:
        log = b" " * taken(nvrtc.nvrtcGetProgramLogSize(program), nvrtc)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"cuda top-k: {status.name} for {shape}: {log.decode()}")
    code = b" " * taken(nvrtc.nvrtcGetCUBINSize(program), nvrtc)
    taken((*nvrtc.nvrtcGetCUBIN(program, code), None), nvrtc)
    nvrtc.nvrtcDestroyProgram(program)
    return code


class Kernel:
    """The kernel for one shape on one device, loaded.

    Args:
        shape: what it is made for.
        device: a CUDA device.

    Attributes:
        shape: what it is made for.
        clusters: how many the device can hold at a time; 0 if it has no place for one.

    Raises:
        RuntimeError: compiler or driver refused.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self._driver = shape, _libraries().driver
        major, minor = torch.cuda.get_device_capability(device)
        code = compile_for(shape, f"sm_{major}{minor}")
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # The driver's calls want torch's context.
            self._load(code)

    def _load(self, code: bytes) -> None:
        driver = self._driver
        self._context = taken(driver.cuCtxGetCurrent(), driver)
        # The module keeps the code that the function points to.
        self._module = taken(driver.cuModuleLoadData(code), driver)
        self._function = taken(driver.cuModuleGetFunction(self._module, b"topk_kernel"), driver)
        address, size = taken(driver.cuModuleGetGlobal(self._module, b"shared_bytes"), driver)
        shared = ctypes.c_int()
        taken((*driver.cuMemcpyDtoH(ctypes.addressof(shared), address, size), None), driver)
        self._shared = shared.value
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuFuncSetAttribute(self._function, most, self._shared)
        self.clusters = 0
        if int(status) == 0:
            config = self._config(1, 0)
            answer = driver.cuOccupancyMaxActiveClusters(self._function, config)
            self.clusters = taken(answer, driver)

    def _config(self, rows: int, stream: int) -> Any:
        driver, config = self._driver, self._driver.CUlaunchConfig()
        config.gridDimX = rows * self.shape.cluster
        config.blockDimX = self.shape.threads
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes, config.hStream = self._shared, stream
        kinds = driver.CUlaunchAttributeID
        cluster, early = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
        cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x = self.shape.cluster
        cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
        early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [cluster, early], 2
        return config

    def launch(self, scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
        """Launch on the current stream; shapes as in ``topkv.hooks.topk``."""
        (rows, columns), select, driver = scores.shape, ids.shape[1], self._driver
        with torch.cuda.device(scores.device):
            # A thread that has made no call of its own yet has no context.
            if int(taken(driver.cuCtxGetCurrent(), driver)) == 0:
                taken((*driver.cuCtxSetCurrent(self._context), None), driver)
            config = self._config(rows, torch.cuda.current_stream().cuda_stream)
            values = (
                *(scores.data_ptr(), lengths.data_ptr(), ids.data_ptr()),
                *(scores.stride(0), ids.stride(0), columns, select),
                *ranks(columns, select, self.shape.samples),
            )
            answer = driver.cuLaunchKernelEx(config, self._function, (values, ARGUMENTS), 0)
        taken((*answer, None), driver)


@cache
def kernel_for(shape: Shape, index: int) -> Kernel:
    """The kernel for a shape on CUDA device ``index``, compiled once: it takes about a second."""
    return Kernel(shape, torch.device("cuda", index))
