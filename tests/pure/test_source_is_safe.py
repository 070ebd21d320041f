"""What the library never does, read from its source: run what it reads, unpickle, listen, write through links.

A place that has a reason stands in a list here with that reason; a new one is noticed.
"""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = sorted((ROOT / "mpitrain").rglob("*.py"))
SHIPPED = [*LIBRARY, *sorted((ROOT / "examples").glob("*.py"))]

UNSAFE_MODULES = set(
    "pickle _pickle cPickle marshal dill cloudpickle joblib shelve copyreg yaml ruamel code codeop jsonpickle pty "
    "socket socketserver http xmlrpc asyncio multiprocessing ftplib telnetlib smtplib urllib.request requests".split()
)
"""They run what they read, or talk to a network; some bring in one that does."""
EVALUATION = {
    ("mpitrain/comm/local.py", "exec"): "the script that the user names, once for each rank",
    ("mpitrain/comm/local.py", "compile"): "the same",
}
NAMES_OF_MODULES = {
    "mpitrain/__init__.py": "names in a table of its own",
    "mpitrain/kernels/__init__.py": "names of kernels in a table of its own",
    "mpitrain/comm/communicator.py": "the class of an error that another rank names, a rank being trusted",
    "mpitrain/faults/fault.py": "names of errno in a list of its own",
}
"""Files that take an attribute of a module by a name which is not written there."""
IMPORTS = {
    "mpitrain/__init__.py": "names in a table of its own",
    "mpitrain/verify/run.py": "the script that the user names",
    "mpitrain/replay/run.py": "the same; never one that a recording names",
    "mpitrain/comm/nccl_line.py": "CuPy's bindings of NCCL, which stand in no list of its own",
}
"""Files that import, or run, a module by a name which is not written there."""
WRITES = {
    "mpitrain/disk.py": "what the others go through",
    "mpitrain/metrics/lines.py": "appends to a file that it opens as no link",
    "mpitrain/metrics/table.py": "a draft beside metrics.csv, made by disk",
    "mpitrain/cli.py": "/dev/null",
    "mpitrain/generation/command.py": "/dev/null",
    "mpitrain/comm/arrival.py": "a note of who speaks, O_EXCL",
    "mpitrain/comm/board_file.py": "the flight board, O_EXCL, random name",
    "mpitrain/comm/copies.py": "copies of the board, O_NOFOLLOW",
    "mpitrain/comm/hang.py": "the report of a hang, O_NOFOLLOW",
    "mpitrain/comm/lifeline.py": "/dev/null",
    "mpitrain/report.py": "/dev/null",
    "mpitrain/checkpoint/tools/command.py": "/dev/null",
    "mpitrain/checkpoint/folders.py": "the lock of a run, O_NOFOLLOW",
    "mpitrain/checkpoint/tools/onefile.py": "a file that it has just made, O_NOFOLLOW",
    "mpitrain/debug/console/terminal.py": "what was typed at the console, O_EXCL, O_NOFOLLOW",
    "mpitrain/compare/command.py": "/dev/null",
    "mpitrain/debug/digests/writing.py": "appends to a file that it opens as no link",
    "mpitrain/faults/injector.py": "notes of faults, O_EXCL",
    "mpitrain/memory/store_file.py": "files of offloaded tensors, O_EXCL",
    "mpitrain/replay/run.py": "in a temporary folder of its own",
    "mpitrain/schedule/command.py": "a picture where the user says",
    "mpitrain/trace/command.py": "/dev/null",
    "mpitrain/trace/perfetto.py": "a draft beside the file that the user names, made by disk",
    "mpitrain/verify/command.py": "in a temporary folder of its own; /dev/null",
    "mpitrain/verify/launch.py": "in a temporary folder of its own",
    "mpitrain/verify/report.py": "a report where the user says",
    "mpitrain/verify/run.py": "in a temporary folder of its own",
    "mpitrain/verify/stale.py": "in a temporary folder of its own",
}
"""Files that open something to write it: each knows what it does where a link or a pipe has the name."""
PICKLED_MESSAGES = set(
    "send recv isend irecv ssend issend bsend ibsend sendrecv sendrecv_replace bcast gather scatter allgather alltoall "
    "reduce allreduce scan exscan mprobe improbe".split()
)
"""Methods of mpi4py's communicators that pickle; those that send buffers begin with a capital."""


@functools.cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def dotted(node):
    """`np.load` of a name or an attribute; of what is called before a dot only the dot: `.write_text`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(paths):
    """File, name of the function, and call."""
    for path in paths:
        for node in nodes(path):
            if isinstance(node, ast.Call):
                yield path.relative_to(ROOT).as_posix(), dotted(node.func), node


def imports(paths):
    """File and module, also of what is imported from it."""
    for path in paths:
        for node in nodes(path):
            if isinstance(node, ast.Import):
                yield from ((path.relative_to(ROOT).as_posix(), alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    yield path.relative_to(ROOT).as_posix(), module


def keyword(call, name):
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


def test_nothing_is_imported_that_runs_what_it_reads_or_talks_to_a_network():
    found = []
    for name, module in imports(SHIPPED):
        parts = module.split(".")
        found += [(name, module) for n in (1, 2, 3) if ".".join(parts[:n]) in UNSAFE_MODULES]
    assert not found
    assert not [call for call in calls(SHIPPED) if call[1].endswith(".listen")]


def test_nothing_is_evaluated_but_the_script_of_the_user():
    found = {(name, f) for name, f, _ in calls(SHIPPED) if f in ("eval", "exec", "compile", "__import__", "execfile")}
    assert found == EVALUATION.keys()


def test_no_shell_is_started():
    found = []
    for name, function, call in calls(SHIPPED):
        if function in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"):
            found.append((name, function))
        if keyword(call, "shell") not in (None, "False"):
            found.append((name, function, "shell"))
    assert not found


def test_arrays_are_read_and_written_without_pickle():
    seen = 0
    for name, function, call in calls(SHIPPED):
        if function in ("np.load", "np.save", "numpy.load", "numpy.save"):
            seen += 1
            assert keyword(call, "allow_pickle") == "False", (name, function)
        assert function not in ("np.savez", "np.savez_compressed"), name
        assert keyword(call, "dtype") not in ("object", "'O'", "np.object_"), (name, function)
    assert seen


def test_attributes_of_modules_are_taken_by_names_that_are_written_there():
    found = set()
    for path in LIBRARY:
        name = path.relative_to(ROOT).as_posix()
        modules = {"compiled", "reference", "import_module"}
        modules |= {
            (a.asname or a.name).split(".")[0] for n in nodes(path) if isinstance(n, ast.Import) for a in n.names
        }
        for _, function, call in calls([path]):
            if function == "getattr" and not isinstance(call.args[1], ast.Constant):
                of = call.args[0].func if isinstance(call.args[0], ast.Call) else call.args[0]
                found |= {name} if dotted(of).split(".")[0] in modules else set()
            assert not function.endswith(("attrgetter", "methodcaller")), name
    assert found == NAMES_OF_MODULES.keys()


def test_modules_are_imported_by_names_that_are_written_there():
    by_name = ("import_module", "spec_from_file_location", "run_path", "run_module")
    assert {name for name, function, _ in calls(SHIPPED) if function.endswith(by_name)} == IMPORTS.keys()


def test_what_writes_files_is_known():
    found = set()
    for name, function, call in calls(LIBRARY):
        mode = keyword(call, "mode") or (ast.unparse(call.args[1]) if function == "open" and len(call.args) > 1 else "")
        if function == "os.open":
            writes = any(flag in ast.unparse(call) for flag in ("O_WRONLY", "O_RDWR", "flags"))
        elif function == "open":
            writes = any(letter in mode for letter in "wax+")
        else:
            writes = function.endswith((".write_text", ".write_bytes", ".touch", ".symlink_to"))
        found |= {name} if writes else set()
    assert found == WRITES.keys()


def test_names_in_the_folder_for_temporary_files_are_random():
    assert not [(n, f) for n, f, _ in calls(SHIPPED) if f in ("tempfile.mktemp", "os.tmpnam", "os.tempnam")]


def test_messages_are_buffers():
    """C75: a lower-case call unpickles whatever arrives."""
    files = [
        path
        for path in LIBRARY
        if path.parent.name == "comm" and path.name in ("mpi.py", "mpi_transport.py", "in_flight.py")
    ]
    found = [(name, function) for name, function, _ in calls(files) if function.rpartition(".")[2] in PICKLED_MESSAGES]
    assert not [call for call in found if not call[1].startswith("self.") or call[1].startswith("self._comm.")]
    assert len(files) == 3
    assert {name for name, module in imports(LIBRARY) if module.startswith("mpi4py")} == {"mpitrain/comm/mpi.py"}
