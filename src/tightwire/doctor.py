"""What works on this machine, tried: backends, array libraries, transports, devices, extras.

Each check that imports a package runs in a process of its own. A broken library may end its process
or wait for ever: that is then what the check reports.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from . import __version__

#: Seconds that one check may take. The first one compiles kernels, also on a busy machine.
TIMEOUT = 120.0

#: The packages that each extra of pyproject.toml brings, by the names they are imported under.
EXTRAS = {
    "cpu": ("numba", "filelock"),
    "torch": ("torch",),
    "jax": ("jax",),
    "cupy": ("cupy",),
    "mpi": ("mpi4py",),
    "ucx": ("ucxx",),
    "nccl": ("cupy", "torch"),
    "triton": ("torch", "triton"),
    "hf": ("transformers", "torch"),
    "plugins": ("zarr", "numcodecs", "ml_dtypes"),
    "cli": ("click", "rich"),
    "plot": ("matplotlib",),
}

Status = Literal["ok", "missing", "failed"]
#: Told before a check starts and when it has ended, with how many have ended since.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Check:
    """One thing that was tried. `fix` is a command that would bring what is missing, or empty."""

    group: str
    name: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """All checks, and what is known of the machine without trying. Sizes are in bytes.

    `ok` says that tightwire itself works: the backends of the host that are installed, and the same
    bytes from every backend that ran.
    """

    ok: bool
    tightwire: str
    python: str
    platform: str
    checks: list[Check]
    processor: dict[str, Any]
    gpus: list[dict[str, Any]]
    caches: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Probe:
    """A check to be made in a process of its own, by the function that is called `_try_<key>`."""

    group: str
    name: str
    key: str
    extra: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    needs_gpu: bool = False

    def lacks(self) -> list[str]:
        """The packages of the extra that are not installed."""
        return missing(EXTRAS.get(self.extra, ()))


_PROBES = (
    _Probe("backends", "ref", "ref"),
    _Probe("backends", "cpu", "cpu", "cpu"),
    _Probe("backends", "triton", "triton", "triton"),
    _Probe("arrays", "numpy", "numpy"),
    _Probe("arrays", "ml_dtypes", "ml_dtypes"),
    _Probe("arrays", "torch", "torch", "torch"),
    _Probe("arrays", "jax", "jax", "jax", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
    _Probe("arrays", "cupy", "cupy", "cupy"),
    _Probe("transports", "threads", "threads"),
    _Probe("transports", "torch.distributed, gloo", "gloo", "torch"),
    _Probe("transports", "torch.distributed, nccl", "nccl", "torch", needs_gpu=True),
    _Probe("transports", "mpi", "mpi", "mpi"),
    _Probe("transports", "ucx", "ucx", "ucx"),
    _Probe("transports", "nccl by cupy", "cupy_nccl", "nccl", needs_gpu=True),
)


#: How many checks `examine` tries.
N_PROBES = len(_PROBES)


class _CannotWork(Exception):
    """Why something does not work here though its packages are installed and not broken."""


def missing(packages: Sequence[str]) -> list[str]:
    """Which of these packages are not installed."""
    return [name for name in packages if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # Something without a spec has taken the name.
        return True


def pip_command(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'tightwire[{extra}]'"


def examine(timeout: float = TIMEOUT, progress: Progress = lambda what, n: None) -> Report:
    """Try everything; a check that takes longer than `timeout` seconds has failed."""
    checks: dict[str, Check] = {}
    values: dict[str, dict[str, Any]] = {}

    def attempt(probes: Sequence[_Probe]) -> None:
        with ThreadPoolExecutor(max(2, min(4, _cpu_count()))) as pool:
            started = {pool.submit(run, probe, timeout): probe for probe in probes}
            progress(f"trying {probes[0].name}", 0)
            for done in as_completed(started):
                probe = started[done]
                checks[probe.key], values[probe.key] = done.result()
                waiting = [p.name for p in probes if p.key not in checks]
                progress(f"trying {waiting[0]}" if waiting else probe.name, 1)

    attempt([probe for probe in _PROBES if not probe.needs_gpu])
    reason = values["torch"].get("no_gpu")
    if reason is None:
        attempt([probe for probe in _PROBES if probe.needs_gpu])
    else:
        for probe in _PROBES:
            if probe.needs_gpu:
                checks[probe.key], values[probe.key] = _without_gpu(probe, reason), {}
                progress(probe.name, 1)
    reference = values["ref"].get("digest")
    wrong = [k for k in ("cpu", "triton") if values[k].get("digest", reference) != reference]
    for key in wrong:
        detail = f"gives other bytes than ref; {checks[key].detail}"
        checks[key] = replace(checks[key], status="failed", detail=detail)
    ok = checks["ref"].status == "ok" and checks["cpu"].status != "failed" and not wrong
    extras = [_extra_check(extra) for extra in EXTRAS]
    gpus = values["torch"].get("gpus", [])
    processor = _processor()
    if reason is not None:
        no_gpu = f"none found: {reason}"
    else:
        what = "is not installed" if checks["torch"].status == "missing" else "does not work here"
        no_gpu = f"unknown: PyTorch, which would find GPUs, {what}"
    devices = [_processor_check(processor), *_gpu_checks(gpus, no_gpu)]
    tried = [checks[probe.key] for probe in _PROBES]
    caches = [
        _cache(name, values[key].get("cache"))
        for name, key in (("numba", "cpu"), ("triton", "triton"))
        if checks[key].status != "missing"
    ]
    cache_checks = [_cache_check(cache) for cache in caches]
    return Report(
        ok=ok,
        tightwire=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        checks=[*tried, *devices, *cache_checks, *extras],
        processor=processor,
        gpus=gpus,
        caches=caches,
    )


def _without_gpu(probe: _Probe, reason: str) -> Check:
    """What is said of a check that needs a GPU where there is none."""
    lacking = probe.lacks()
    packages = f"; not installed ({', '.join(lacking)})" if lacking else ""
    fix = pip_command(probe.extra) if lacking else ""
    return Check(probe.group, probe.name, "missing", f"no GPU: {reason}{packages}", fix)


def run(probe: _Probe, timeout: float) -> tuple[Check, dict[str, Any]]:
    """Make one check in a process of its own. Returns its result, and details for the report."""
    lacking = probe.lacks()
    if lacking:
        detail = f"not installed ({', '.join(lacking)})"
        return Check(probe.group, probe.name, "missing", detail, pip_command(probe.extra)), {}
    with tempfile.TemporaryDirectory(prefix="tightwire-") as folder:
        result, errors = Path(folder, "result"), Path(folder, "errors")
        # The path of this process: a script in the working directory could hide a library.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from tightwire.doctor import answer; answer({probe.key!r}, {str(result)!r})"
        )
        with open(errors, "wb") as file:
            child = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                cwd=folder,
                env={**_environment(), **probe.environment},
                start_new_session=True,
            )
            try:
                status: int | None = child.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                # Children of its own, as those of MPI, too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if result.is_file() and (text := result.read_text()):
            found = json.loads(text)
            check = Check(probe.group, probe.name, found["status"], found["detail"])
            return check, found["more"]
        if status is None:
            detail = f"no answer within {timeout:g} s"
        else:
            lines = errors.read_text(errors="replace").strip().splitlines()
            detail = f"the process ended with {_exit_text(status)}"
            detail += f": {lines[-1].strip()}" if lines else ""
        return Check(probe.group, probe.name, "failed", detail), {}


def _environment() -> dict[str, str]:
    """That of this process, without what would make a child a rank of a running MPI job."""
    job = ("OMPI_", "PMI", "PRTE_", "SLURM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(job)}


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def answer(key: str, path: str) -> None:
    """Make the check `key` in this process and write its result to the file `path`."""
    more: dict[str, Any] = {}
    try:
        status, detail = "ok", _TRIES[key](more)
    except _CannotWork as reason:
        status, detail = "missing", str(reason)
    except BaseException as error:
        text = " ".join(str(error).split())
        status, detail = "failed", f"{type(error).__name__}: {text}"[:500]
    temporary = Path(f"{path}.part")
    temporary.write_text(json.dumps({"status": status, "detail": detail, "more": more}))
    temporary.rename(path)


# What is tried. Each returns a line of detail and may put more into a dict.


def _sample() -> Any:
    """A bfloat16 tensor of some tiles, with a few escapes."""
    import ml_dtypes
    import numpy as np

    values = np.sin(np.arange(10_000, dtype=np.float32)) / 16
    values[::997] = 1e30
    return values.astype(ml_dtypes.bfloat16)


def _round_trip(x: Any, more: dict[str, Any], backend: str | None) -> None:
    """Encode and decode `x`; raises RuntimeError if it does not come back bit for bit."""
    import hashlib

    from .arrays import describe, host_bits
    from .codec import encode
    from .decoding import decode

    dtype = describe(x).dtype
    before = host_bits(x, dtype).tobytes()
    buffer = encode(x, backend=backend)
    after = host_bits(decode(buffer, backend=backend), dtype).tobytes()
    if before != after:
        raise RuntimeError("decode did not give the input back")
    more["digest"] = hashlib.sha256(bytes(buffer)).hexdigest()


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return str(getattr(importlib.import_module(name), "__version__", "version unknown"))


def _try_ref(more: dict[str, Any]) -> str:
    _round_trip(_sample(), more, "ref")
    return "NumPy; always there, slow for large tensors"


def _try_cpu(more: dict[str, Any]) -> str:
    from .codecs import zipccl_cpu

    _round_trip(_sample(), more, "cpu")
    folder = zipccl_cpu.cache_folder()
    if folder is not None:
        more["cache"] = str(folder)
    return f"Numba {_version('numba')}; the same bytes as ref"


def _try_triton(more: dict[str, Any]) -> str:
    import torch

    reason = _no_gpu(torch)
    if reason is not None:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton asks when it is imported.
    import triton

    with contextlib.suppress(AttributeError):
        more["cache"] = str(triton.knobs.cache.dir)
    x = torch.from_numpy(_sample().view("int16")).view(torch.bfloat16)
    _round_trip(x if reason is not None else x.cuda(), more, "triton")
    if reason is not None:
        return f"Triton {triton.__version__}, interpreted: for tests only. No GPU: {reason}"
    return f"Triton {triton.__version__} on {torch.cuda.get_device_name()}; the same bytes as ref"


def _no_gpu(torch: Any) -> str | None:
    """Why PyTorch has no GPU here, None if it has one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:
        return " ".join(str(error).split())
    return "PyTorch finds none"


def _try_numpy(more: dict[str, Any]) -> str:
    import numpy as np

    _round_trip(np.linspace(0, 1, 1000, dtype=np.float32), more, "ref")
    return _version("numpy")


def _try_ml_dtypes(more: dict[str, Any]) -> str:
    _round_trip(_sample(), more, "ref")
    return f"{_version('ml_dtypes')}: bfloat16 and 8-bit floats in NumPy"


def _try_torch(more: dict[str, Any]) -> str:
    import torch

    _round_trip(torch.linspace(0, 1, 1000, dtype=torch.bfloat16, device="cpu"), more, "ref")
    reason = _no_gpu(torch)
    if reason is None:
        more["gpus"] = [_gpu(torch, i) for i in range(torch.cuda.device_count())]
    else:
        more["no_gpu"] = reason
    return str(torch.__version__)


def _gpu(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_nbytes": total,
        "free_nbytes": free,
    }


def _try_jax(more: dict[str, Any]) -> str:
    import jax
    import jax.numpy as jnp

    platform = jax.default_backend()
    _round_trip(jnp.linspace(0, 1, 1000, dtype=jnp.bfloat16), more, None)
    return f"{_version('jax')}, on {platform}"


def _try_cupy(more: dict[str, Any]) -> str:
    import cupy

    _round_trip(cupy.linspace(0, 1, 1000, dtype=cupy.float32), more, None)
    return _version_of_module(cupy)


def _version_of_module(module: Any) -> str:
    return str(getattr(module, "__version__", "version unknown"))


def _exchange(transport: Any, x: Any, out: Any) -> None:
    """Send a message through a transport of one rank; RuntimeError if it does not arrive."""
    transport.all_gather(out, x)
    if out.tolist() != x.tolist():
        raise RuntimeError("a message did not arrive as it was sent")


def _bytes() -> tuple[Any, Any]:
    import numpy as np

    return np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)


def _try_threads(more: dict[str, Any]) -> str:
    from .adapters.transports.threads import connect

    _exchange(connect(1)[0], *_bytes())
    return "ranks that are threads of one process"


@contextlib.contextmanager
def _process_group(backend: str) -> Iterator[None]:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _try_gloo(more: dict[str, Any]) -> str:
    import torch
    import torch.distributed as dist

    from .adapters.transports.torch_dist import TorchDist

    if not dist.is_available() or not dist.is_gloo_available():
        raise _CannotWork(f"PyTorch {torch.__version__} is built without gloo")
    with _process_group("gloo"):
        _exchange(TorchDist(), *_bytes())
    return f"PyTorch {torch.__version__}"


def _try_nccl(more: dict[str, Any]) -> str:
    import torch
    import torch.distributed as dist

    from .adapters.transports.torch_dist import TorchDist

    if not dist.is_available() or not dist.is_nccl_available():
        raise _CannotWork(f"PyTorch {torch.__version__} is built without NCCL")
    with _process_group("nccl"):
        _exchange(TorchDist(), *(torch.from_numpy(x).cuda() for x in _bytes()))
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def _try_mpi(more: dict[str, Any]) -> str:
    from mpi4py import MPI

    from .adapters.transports.mpi import Mpi

    _exchange(Mpi(), *_bytes())
    library = MPI.Get_library_version().strip("\0").partition("\n")[0].partition(",")[0]
    return f"mpi4py {_version('mpi4py')}, {library}"


def _try_ucx(more: dict[str, Any]) -> str:
    import ucxx

    from .adapters.transports.ucx import Ucx

    _exchange(Ucx(0, 1, ("127.0.0.1", 0)), *_bytes())
    return f"ucxx {_version_of_module(ucxx)}, UCX {'.'.join(map(str, ucxx.get_ucx_version()))}"


def _try_cupy_nccl(more: dict[str, Any]) -> str:
    import torch

    from .adapters.transports.nccl import Nccl

    _exchange(Nccl(Nccl.unique_id(), 0, 1), *(torch.from_numpy(x).cuda() for x in _bytes()))
    return "all-gather by NCCL without torch.distributed"


_TRIES: dict[str, Callable[[dict[str, Any]], str]] = {
    probe.key: globals()[f"_try_{probe.key}"] for probe in _PROBES
}


# What is known without trying.


def _cpu_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


#: Names of instruction sets in /proc/cpuinfo that are worth a word.
_SIMD = ("sse4_2", "avx2", "avx512f", "avx512bw", "amx_tile", "asimd", "sve", "sve2")


def _processor() -> dict[str, Any]:
    """The processor's name, cores and instruction sets, as far as the system tells."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip().lower(), value.strip())
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    memory = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "name": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": _cpu_count(),
        "simd": [name for name in _SIMD if name in flags],
        "memory_nbytes": memory,
    }


def _processor_check(processor: Mapping[str, Any]) -> Check:
    from .units import size_text

    n = processor["cores"]
    parts = [f"{processor['name']}, {n} core{'s' * (n != 1)} for this process"]
    if processor["memory_nbytes"]:
        parts.append(f"{size_text(processor['memory_nbytes'])} memory")
    parts += [" ".join(processor["simd"])] if processor["simd"] else []
    return Check("devices", "cpu", "ok", ", ".join(parts))


def _gpu_checks(gpus: Sequence[Mapping[str, Any]], otherwise: str) -> list[Check]:
    from .units import size_text

    if not gpus:
        return [Check("devices", "gpu", "missing", otherwise)]
    return [
        Check(
            "devices",
            f"gpu {gpu['index']}",
            "ok",
            f"{gpu['name']}, compute capability {gpu['capability']}, "
            f"{size_text(gpu['free_nbytes'])} of {size_text(gpu['memory_nbytes'])} free",
        )
        for gpu in gpus
    ]


def _cache(name: str, folder: str | None) -> dict[str, Any]:
    """Where compiled kernels are kept, whether that can be written, and how many bytes are there.

    Numba keeps its files in the folders of modules; only its own files are counted.
    """
    nbytes = 0
    if folder is not None:
        suffixes = (".nbi", ".nbc") if name == "numba" else ("",)
        for parent, _, files in os.walk(folder):
            for file in files:
                if file.endswith(suffixes):
                    with contextlib.suppress(OSError):
                        nbytes += os.stat(os.path.join(parent, file)).st_size
    return {
        "name": name,
        "folder": folder,
        "writable": folder is not None and _is_writable(Path(folder)),
        "nbytes": nbytes,
    }


def _is_writable(folder: Path) -> bool:
    """True if a file can be made in a folder, or in the closest one above it that is there."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _cache_check(cache: Mapping[str, Any]) -> Check:
    from .units import size_text

    variable = {"numba": "NUMBA_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}[cache["name"]]
    if cache["folder"] is None:
        detail = f"no folder can be written: kernels are compiled anew; set {variable}"
    else:
        detail = f"{cache['folder']}, {size_text(cache['nbytes'])}"
        if cache["writable"]:
            return Check("compiled kernels", cache["name"], "ok", f"{detail}, writable")
        detail += f", not writable: kernels are compiled anew; set {variable} to another folder"
    return Check("compiled kernels", cache["name"], "failed", detail)


def _extra_check(extra: str) -> Check:
    lacking = missing(EXTRAS[extra])
    if not lacking:
        return Check("extras", extra, "ok", ", ".join(EXTRAS[extra]))
    detail = f"not installed ({', '.join(lacking)})"
    return Check("extras", extra, "missing", detail, pip_command(extra))
