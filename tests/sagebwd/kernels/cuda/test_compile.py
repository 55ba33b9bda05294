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


def test_a_source_is_of_the_first_folder_that_has_it(sources):
    own, shared = sources.folders
    (shared / "minimal.cu").write_text("")
    assert sources.path("minimal") == own / "minimal.cu"
    (own / "minimal.cu").unlink()
    assert sources.path("minimal") == shared / "minimal.cu"
    assert sources.path("other") == shared / "other.cu"


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_120"])
def test_packing_compiles_for_gpus_that_kernel_sets_are_planned_for(architecture):
    """For Hopper: hopper/test_sources.py."""
    sources, macros = Sources(architecture, (compiler.SHARED,)), {"HEAD_DIM": 64, "IS_BF16": True}
    assert b".text.pack_grad_kernel" in compiler.compile_source(sources, "packing", macros)[0]


# --- The cache on disk, and what is trusted of it: the compiler is a stand-in ------------------------------

theirs = b"left there by another user"


@pytest.fixture
def compiled(monkeypatch):
    """What was compiled so far: each time to other bytes."""
    done = []

    def compile_source(*arguments):
        done.append(b"compiled %d" % len(done))
        return done[-1], ""

    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(compiler, "compile_source", compile_source)
    return done


@pytest.fixture
def load(sources, cache, compiled):
    """load(macros of minimal.cu) -> its kernel."""
    return lambda **macros: load_or_compile(sources, "minimal", macros or {"VALUE": 1})


@pytest.fixture
def planted(load, cache, compiled):
    """A file of the cache with another kernel in it, whose checksum, which protects from damage, is right."""
    load()
    (path,) = cache.iterdir()
    path.write_bytes(compiler._checksum(path, theirs) + theirs)
    assert load() == theirs
    return path


def test_compiles_again_for_other_sources_macros_compilers_and_architectures(
    load, sources, compiled, monkeypatch
):
    own, shared = sources.folders
    changed = [
        own / "minimal.cu",
        own / "new.cuh",
        *(shared / x for x in ("value.cuh", "new.cuh", "other.cu")),
    ]
    for file in (None, *changed):
        if file:
            with file.open("a") as source:
                source.write("// changed\n")
        assert load() == load() == compiled[-1]
    for macros in ({"VALUE": 0}, {"VALUE": 1, "IS_FLAGGED": True}):
        load(**macros)
    assert len(compiled) == len(changed) + 3
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 1))
    load()
    load_or_compile(Sources("sm_80", sources.folders), "minimal", {"VALUE": 1})
    assert len(compiled) == len(changed) + 5


@pytest.mark.parametrize("damage", [lambda x: b"", lambda x: x[:-1], lambda x: x[:-1] + bytes([x[-1] ^ 1])])
def test_damaged_files_are_compiled_again(damage, load, cache, compiled):
    load()
    (path,) = cache.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert load() == load() == compiled[1]


def test_a_folder_that_is_not_writable_is_warned_of_once(load, cache, compiled):
    cache.write_text("not a folder")
    with pytest.warns(UserWarning, match="set SAGEBWD_CACHE_DIR") as warned:
        assert [load(), load()] == compiled
    assert len(warned) == 1


def test_a_failed_write_leaves_nothing_behind(load, cache, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(UserWarning, match="disk full"):
        load()
    assert not list(cache.iterdir())


def belong_to_another_user(monkeypatch, path):
    """As far as this process sees; giving it away would need root."""
    inode = path.stat().st_ino

    def replaced(original):
        def status(*arguments, **options):
            found = original(*arguments, **options)
            return os.stat_result((*found[:4], 12345, *found[5:])) if found.st_ino == inode else found

        return status

    monkeypatch.setattr(os, "stat", replaced(os.stat))
    monkeypatch.setattr(os, "fstat", replaced(os.fstat))


def modes(*paths):
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


@pytest.fixture
def loosest_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("loosest_umask")
def test_the_folder_and_its_files_are_for_this_user_alone(load, cache):
    load()
    assert modes(cache, *cache.iterdir()) == [0o700, 0o600]


@pytest.mark.parametrize("mode", [0o720, 0o1702, None])
def test_a_folder_that_others_can_write_to_is_not_used(mode, load, cache, planted, compiled, monkeypatch):
    problem = "it belongs to user 12345" if mode is None else f"its mode {mode:04o}"
    belong_to_another_user(monkeypatch, cache) if mode is None else cache.chmod(mode)
    with pytest.warns(
        UserWarning, match=rf"{cache} \({problem}\b.*set SAGEBWD_CACHE_DIR .*chmod go-w {cache}"
    ):
        assert load() == compiled[1]
    assert planted.read_bytes().endswith(theirs)  # nor written to


@pytest.mark.parametrize("mode", [0o660, 0o606, None])
def test_a_file_that_others_can_write_to_is_made_again(mode, load, planted, compiled, monkeypatch):
    problem = "it belongs to user 12345" if mode is None else f"its mode {mode:04o}"
    belong_to_another_user(monkeypatch, planted) if mode is None else planted.chmod(mode)
    with pytest.warns(UserWarning, match=f"{planted} is not used, because {problem}"):
        assert load() == compiled[1]
    assert load() == compiled[1]
    assert modes(planted) == [0o600]


def test_a_kernel_under_another_name_is_not_loaded(load, cache, planted, compiled):
    load(VALUE=2)
    (other,) = set(cache.iterdir()) - {planted}
    planted.replace(other)
    assert load(VALUE=2) == compiled[2]


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_what_is_no_file_is_replaced(kind, load, cache, planted, compiled):
    elsewhere = planted.rename(cache.parent / "elsewhere")
    planted.symlink_to(elsewhere) if kind == "link" else os.mkfifo(planted)
    assert load() == compiled[1]
    assert planted.read_bytes().endswith(compiled[1])


def compile_into(queue, folders, cache):
    os.environ["SAGEBWD_CACHE_DIR"] = cache
    queue.put(load_or_compile(Sources("sm_90a", folders), "minimal", {"VALUE": 1}))


@needs_nvrtc
def test_processes_and_threads_at_once(sources, cache):
    queue = SERVER.SimpleQueue()
    for _ in range(2):
        SERVER.Process(target=compile_into, args=(queue, sources.folders, str(cache))).start()
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(load_or_compile, sources, "minimal", {"VALUE": 1}) for _ in range(8)]
        cubins = {job.result() for job in jobs}
    cubins |= {queue.get() for _ in range(2)}
    assert len(cubins) == len(list(cache.iterdir())) == 1


def test_cache_folder(monkeypatch, tmp_path):
    folders = {"SAGEBWD_CACHE_DIR": "chosen", "XDG_CACHE_HOME": "xdg/sagebwd", "HOME": ".cache/sagebwd"}
    for variable, folder in zip(folders, ("chosen", "xdg", "."), strict=True):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    for variable, folder in folders.items():
        assert compiler.cache_folder() == tmp_path / folder
        monkeypatch.delenv(variable)


VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture
def no_caches(monkeypatch, cache):
    """None is chosen, and the test's own choices are undone."""
    for variable in (*VARIABLES, "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"):
        monkeypatch.setenv(variable, "")
    return cache


@pytest.mark.usefixtures("loosest_umask")
def test_other_compilers_cache_in_folders_of_ours_or_in_private_ones_that_the_user_chose(
    no_caches, monkeypatch, tmp_path
):
    ours, chosen = [no_caches / "inductor", no_caches / "triton"], [tmp_path / name for name in VARIABLES]
    for folders in (ours, chosen):
        use_private_caches()
        assert [Path(os.environ[variable]) for variable in VARIABLES] == folders
        assert modes(no_caches, *folders) == [0o700] * 3
        for variable, folder in zip(VARIABLES, chosen, strict=True):
            monkeypatch.setenv(variable, str(folder))


@pytest.mark.parametrize("shared", ["chosen", "ours", "inside ours", "of another user"])
def test_a_cache_that_others_can_write_to_is_not_used(no_caches, monkeypatch, tmp_path, shared):
    folder = {"chosen": tmp_path / "torchinductor_me", "ours": no_caches}.get(shared, no_caches / "inductor")
    folder.mkdir(parents=True, mode=0o700)
    belong_to_another_user(monkeypatch, folder) if shared == "of another user" else folder.chmod(0o777)
    if shared == "chosen":
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    with pytest.warns(UserWarning, match=rf"cannot be cached in {folder} "):
        use_private_caches()
    used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder not in (used, *used.parents)
    assert modes(used) == [0o700]


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
def test_an_error_is_that_of_the_compiler_with_its_log_and_not_kept(sources, cache):
    macros = {"SIZE": 3, "IS_FLAGGED": True}
    message = r"minimal\.cu \(IS_FLAGGED, SIZE=3\) does not compile.*\n.*identifier \"VALUE\" is undefined"
    with pytest.raises(RuntimeError, match=message):
        compiler.start_compiling(sources, "minimal", macros).result()
    header = sources.folders[1] / "value.cuh"
    header.write_text(header.read_text() + "#define VALUE 1\n")
    assert compiler.start_compiling(sources, "minimal", macros).result()


#: Fifty sources are compiled, two at a time, when the process forks, and when its main thread ends. Another
#: thread goes on, which then needs a kernel, twice.
FORKS_AND_ENDS = """
import multiprocessing, threading, time
import torch
from sagebwd import sage_attention
from sagebwd.kernels.cuda import compile as compiler

def compile_slowly(sources, source, defines):
    if source != "forward":
        print("compiles", flush=True)
        time.sleep(0.5)
    return source.encode()

def train():
    threading.main_thread().join()
    sources = compiler.Sources("sm_80", ())
    print(*(compiler.finish_compiling(sources, "forward", {}) for _ in range(2)))

compiler.load_or_compile = compile_slowly
compiler._cores = threading.Semaphore(2)
for i in range(50):
    compiler.start_compiling(compiler.Sources("sm_80", ()), str(i), {})
worker = multiprocessing.get_context("fork").Process(target=sage_attention, args=[torch.ones(2, 8)] * 3)
worker.start()
worker.join(timeout=60)
print("worker", worker.exitcode, flush=True)
threading.Thread(target=train).start()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_and_the_end_of_the_main_thread_do_not_wait_for_all_that_was_asked_for():
    command = [sys.executable, "-c", FORKS_AND_ENDS]
    ended = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "worker 0" in ended.stdout
    assert 2 <= ended.stdout.count("compiles") < 40
    assert "b'forward' b'forward'" in ended.stdout, ended.stderr
