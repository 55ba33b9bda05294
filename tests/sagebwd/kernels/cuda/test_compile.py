"""Compiling with NVRTC, and the cache on disk; none of it needs a GPU."""

import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sagebwd.kernels.cuda import compile as compiler
from sagebwd.kernels.cuda.compile import Sources, load_or_compile, use_private_caches
from tests.cli import ROOT
from tests.warm import SERVER

needs_nvrtc = pytest.mark.usefixtures("nvrtc")


# --- Compiling ---------------------------------------------------------------------------------------------


def test_a_source_is_of_the_first_folder_that_has_it(sources):
    assert sources.path("minimal") == sources.folders[0] / "minimal.cu"
    (sources.folders[1] / "minimal.cu").write_text("")
    assert sources.path("minimal") == sources.folders[0] / "minimal.cu"
    (sources.folders[0] / "minimal.cu").unlink()
    assert sources.path("minimal") == sources.folders[1] / "minimal.cu"
    assert sources.path("other") == sources.folders[1] / "other.cu"


@needs_nvrtc
def test_what_does_not_compile_is_named_with_the_log(sources):
    with pytest.raises(RuntimeError, match=r"minimal\.cu \(IS_FLAGGED, SIZE=3\) does not compile") as raised:
        compiler.compile_source(sources, "minimal", {"SIZE": 3, "IS_FLAGGED": True})
    assert 'identifier "VALUE" is undefined' in str(raised.value)


# --- The cache on disk -------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize(
    ("folder", "file"), [(0, "minimal.cu"), (0, "new.cuh"), (1, "value.cuh"), (1, "new.cuh"), (1, "other.cu")]
)
def test_compiles_again_when_a_source_changes_in_any_folder(folder, file, sources, cache, compiled):
    load_or_compile(sources, "minimal", {"VALUE": 1})
    with (sources.folders[folder] / file).open("a") as source:
        source.write("// changed\n")
    load_or_compile(sources, "minimal", {"VALUE": 1})
    assert len(compiled) == 2


@needs_nvrtc
def test_compiles_again_for_other_defines_compilers_and_architectures(sources, cache, compiled, monkeypatch):
    for defines in ({"VALUE": 1}, {"VALUE": 0}, {"VALUE": 1, "IS_FLAGGED": True}):
        load_or_compile(sources, "minimal", defines)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 1))
    load_or_compile(sources, "minimal", {"VALUE": 1})
    assert len(compiled) == 4
    load_or_compile(Sources("sm_80", sources.folders), "minimal", {"VALUE": 1})
    assert len(compiled) == 5


@needs_nvrtc
@pytest.mark.parametrize("damage", [lambda x: b"", lambda x: x[:-1], lambda x: x[:-1] + bytes([x[-1] ^ 1])])
def test_damaged_files_are_compiled_again(damage, sources, cache, compiled):
    cubin = load_or_compile(sources, "minimal", {"VALUE": 1})
    (path,) = cache.iterdir()
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    assert load_or_compile(sources, "minimal", {"VALUE": 1}) == cubin
    assert len(compiled) == 2
    assert path.read_bytes() == intact


@needs_nvrtc
def test_a_folder_that_is_not_writable_is_warned_of_once(sources, cache, compiled):
    cache.write_text("not a folder")
    with pytest.warns(UserWarning, match="set SAGEBWD_CACHE_DIR") as warned:
        cubins = {load_or_compile(sources, "minimal", {"VALUE": 1}) for _ in range(2)}
    assert len(warned) == 1
    assert len(cubins) == 1
    assert len(compiled) == 2


@needs_nvrtc
def test_a_failed_write_leaves_nothing_behind(sources, cache, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(UserWarning, match="disk full"):
        load_or_compile(sources, "minimal", {"VALUE": 1})
    assert not list(cache.iterdir())


# NVRTC is not needed to see what is trusted: the compiler is a stand-in.
ours, theirs = b"compiled here", b"left there by another user"


@pytest.fixture
def compiles(monkeypatch):
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(compiler, "compile_source", lambda *_: (ours, ""))


@pytest.fixture
def planted(sources, cache, compiles):
    """A file of the cache with another kernel in it, whose checksum is right."""
    load_or_compile(sources, "minimal", {"VALUE": 1})
    (path,) = cache.iterdir()
    path.write_bytes(compiler._checksum(path, theirs) + theirs)
    assert (
        load_or_compile(sources, "minimal", {"VALUE": 1}) == theirs
    )  # the checksum protects from damage only
    return path


def belong_to_another_user(monkeypatch, *paths):
    """These files, as far as this process sees; giving them away would need root."""
    inodes = {path.stat().st_ino for path in paths}

    def replaced(original):
        def status(*arguments, **options):
            found = original(*arguments, **options)
            return os.stat_result((*found[:4], 12345, *found[5:])) if found.st_ino in inodes else found

        return status

    monkeypatch.setattr(os, "stat", replaced(os.stat))
    monkeypatch.setattr(os, "fstat", replaced(os.fstat))


def test_the_folder_and_its_files_are_for_this_user_alone(sources, cache, compiles):
    before = os.umask(0)  # the loosest
    try:
        load_or_compile(sources, "minimal", {"VALUE": 1})
    finally:
        os.umask(before)
    (file,) = cache.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, file)] == [0o700, 0o600]


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(mode, sources, cache, planted):
    cache.chmod(mode)
    with pytest.warns(
        UserWarning, match=rf"{cache} \(its mode {mode:04o} .*set SAGEBWD_CACHE_DIR .*chmod go-w {cache}"
    ):
        assert load_or_compile(sources, "minimal", {"VALUE": 1}) == ours
    assert planted.read_bytes().endswith(theirs)  # nor written to


def test_a_folder_of_another_user_is_not_used(sources, cache, planted, monkeypatch):
    belong_to_another_user(monkeypatch, cache)
    with pytest.warns(UserWarning, match=r"belongs to user 12345.*set SAGEBWD_CACHE_DIR"):
        assert load_or_compile(sources, "minimal", {"VALUE": 1}) == ours


@pytest.mark.parametrize("mode", [0o660, 0o606])
def test_a_file_that_others_can_write_to_is_made_again(mode, sources, cache, planted):
    planted.chmod(mode)
    with pytest.warns(UserWarning, match=rf"{planted} is not used, because its mode 0{mode:o}"):
        assert load_or_compile(sources, "minimal", {"VALUE": 1}) == ours
    assert stat.S_IMODE(planted.stat().st_mode) == 0o600
    assert load_or_compile(sources, "minimal", {"VALUE": 1}) == ours


def test_a_file_of_another_user_is_made_again(sources, cache, planted, monkeypatch):
    belong_to_another_user(monkeypatch, planted)
    with pytest.warns(UserWarning, match=r"belongs to user 12345"):
        assert load_or_compile(sources, "minimal", {"VALUE": 1}) == ours


def test_a_kernel_under_another_name_is_not_loaded(sources, cache, planted):
    load_or_compile(sources, "minimal", {"VALUE": 2})
    (other,) = set(cache.iterdir()) - {planted}
    planted.replace(other)
    assert load_or_compile(sources, "minimal", {"VALUE": 2}) == ours


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_what_is_no_file_is_replaced(kind, sources, cache, planted):
    elsewhere = planted.rename(cache.parent / "elsewhere")
    planted.symlink_to(elsewhere) if kind == "link" else os.mkfifo(planted)
    assert load_or_compile(sources, "minimal", {"VALUE": 1}) == ours
    assert planted.read_bytes().endswith(ours)


def compile_into(queue, folders, cache):
    os.environ["SAGEBWD_CACHE_DIR"] = cache
    queue.put(load_or_compile(Sources("sm_90a", folders), "minimal", {"VALUE": 1}))


@needs_nvrtc
def test_processes_and_threads_at_once(sources, cache):
    queue = SERVER.SimpleQueue()
    arguments = (queue, sources.folders, str(cache))
    for _ in range(2):
        SERVER.Process(target=compile_into, args=arguments).start()
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(load_or_compile, sources, "minimal", {"VALUE": 1}) for _ in range(8)]
        cubins = {job.result() for job in jobs}
    cubins |= {queue.get() for _ in range(2)}
    assert len(cubins) == 1
    assert len(list(cache.iterdir())) == 1


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path / "chosen"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.cache_folder() == tmp_path / "chosen"
    monkeypatch.delenv("SAGEBWD_CACHE_DIR")
    assert compiler.cache_folder() == tmp_path / "xdg" / "sagebwd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiler.cache_folder() == tmp_path / ".cache" / "sagebwd"


VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture
def no_caches(monkeypatch, cache):
    """None is chosen, and the test's own choices are undone."""
    for variable in (*VARIABLES, "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"):
        monkeypatch.setenv(variable, "")
    return cache


def test_other_compilers_cache_in_folders_of_ours(no_caches):
    before = os.umask(0)
    try:
        use_private_caches()
    finally:
        os.umask(before)
    folders = [Path(os.environ[variable]) for variable in VARIABLES]
    assert folders == [no_caches / "inductor", no_caches / "triton"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (no_caches, *folders)] == [0o700] * 3


def test_a_cache_that_the_user_chose_is_kept_if_it_is_private(no_caches, monkeypatch, tmp_path):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, str(tmp_path / variable))
    use_private_caches()
    assert [os.environ[variable] for variable in VARIABLES] == [str(tmp_path / v) for v in VARIABLES]


@pytest.mark.parametrize("shared", ["chosen", "ours", "inside ours", "of another user"])
def test_a_cache_that_others_can_write_to_is_not_used(no_caches, monkeypatch, tmp_path, shared):
    folder = {"chosen": tmp_path / "torchinductor_me", "ours": no_caches}.get(shared, no_caches / "inductor")
    folder.mkdir(parents=True, mode=0o700)
    if shared == "of another user":
        belong_to_another_user(monkeypatch, folder)
    else:
        folder.chmod(0o777)
    if shared == "chosen":
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    with pytest.warns(UserWarning, match=rf"cannot be cached in {folder} "):
        use_private_caches()
    used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert used != folder
    assert folder not in used.parents
    assert stat.S_IMODE(used.stat().st_mode) == 0o700


# --- In threads --------------------------------------------------------------------------------------------


@pytest.fixture
def no_cubins(monkeypatch):
    """Nothing was compiled in this process, and four compilers may run at a time."""
    monkeypatch.setattr(compiler, "_cubins", {})
    monkeypatch.setattr(compiler, "_cores", threading.Semaphore(4))


@pytest.mark.usefixtures("no_cubins")
def test_sources_compile_side_by_side_and_once(sources, monkeypatch):
    together, done = threading.Barrier(4), []

    def compile_slowly(sources, source, defines):
        together.wait(timeout=60)
        done.append(defines["VALUE"])
        return str(defines).encode()

    monkeypatch.setattr(compiler, "load_or_compile", compile_slowly)
    ask = lambda value: compiler.start_compiling(sources, "minimal", {"VALUE": value}).result()  # noqa: E731
    with ThreadPoolExecutor(12) as pool:
        cubins = list(pool.map(ask, [0, 1, 2, 3] * 3))
    assert cubins == [str({"VALUE": i}).encode() for i in range(4)] * 3
    assert sorted(done) == [0, 1, 2, 3]
    assert not [x for x in threading.enumerate() if x._target is compiler._compile_into]


@needs_nvrtc
@pytest.mark.usefixtures("no_cubins")
def test_an_error_of_a_thread_is_that_of_the_compiler_and_not_kept(sources, cache):
    with pytest.raises(RuntimeError, match=r"minimal\.cu \(.*\) does not compile.*\n.*VALUE.* is undefined"):
        compiler.start_compiling(sources, "minimal", {"IS_FLAGGED": True}).result()
    header = sources.folders[1] / "value.cuh"
    header.write_text(header.read_text() + "#define VALUE 1\n")
    assert compiler.start_compiling(sources, "minimal", {"IS_FLAGGED": True}).result()


#: Fifty sources are compiled, two at a time, when the process forks, and when it ends.
FORKS_AND_ENDS = """
import multiprocessing, threading, time
import torch
from sagebwd import sage_attention
from sagebwd.kernels.cuda import compile as compiler

def compile_slowly(sources, source, defines):
    print("compiles", flush=True)
    time.sleep(0.5)

compiler.load_or_compile = compile_slowly
compiler._cores = threading.Semaphore(2)
for i in range(50):
    compiler.start_compiling(compiler.Sources("sm_80", ()), str(i), {})
worker = multiprocessing.get_context("fork").Process(target=sage_attention, args=[torch.ones(2, 8)] * 3)
worker.start()
worker.join(timeout=60)
print("worker", worker.exitcode, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_and_the_end_of_the_process_do_not_wait_for_all_that_was_asked_for():
    command = [sys.executable, "-c", FORKS_AND_ENDS]
    ended = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "worker 0" in ended.stdout
    assert 2 <= ended.stdout.count("compiles") < 40


#: The main thread ends while another goes on, which then needs a kernel, twice.
OUTLIVES_THE_MAIN_THREAD = """
import threading
from sagebwd.kernels.cuda import compile as compiler

compiler.load_or_compile = lambda sources, source, defines: source.encode()

def train():
    threading.main_thread().join()
    sources = compiler.Sources("sm_80", ())
    print(*(compiler.finish_compiling(sources, "forward", {}) for _ in range(2)))

threading.Thread(target=train).start()
"""


def test_a_thread_that_outlives_the_main_thread_gets_its_kernels():
    command = [sys.executable, "-c", OUTLIVES_THE_MAIN_THREAD]
    ended = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert ended.stdout.strip() == "b'forward' b'forward'", ended.stderr


# --- Without a compiler -------------------------------------------------------------------------------------


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    compiler.why_no_compiler.cache_clear()
    try:
        assert "install cuda-bindings" in compiler.why_no_compiler()
    finally:
        compiler.why_no_compiler.cache_clear()
