"""Build the images, run compose.yaml's CPU profile, break it in every way that an operator will
see, and say how it went.

`make test-images`. Exit status 0 if all held or no engine could be started (it says why), 1 if
something did not hold. The summary is in build/test-images/summary.md, beside the containers' logs.
Everything is reached over loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from baton.client import Client, Completion
from baton.errors import BatonError

sys.path.insert(0, str(Path(__file__).parent))
from container_engine import Engine, NoEngine, find_base, is_stand_in, run, running_engine

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "test-images"
PROJECT = "baton-test-images"
SERVICES = ("gateway", "prefill", "decode", "redis")
#: 160 tokens; decode workers would come to compute that much by themselves, as it is faster with so
#: small a model.
PROMPT = "def walk(path):\n    for name in sorted(os.listdir(path)):\n" * 8
MAX_LOCAL_PREFILL_TOKENS = "16"
#: That an engine restarts a container, and the service is ready again, takes at most this.
RECOVERY_TIMEOUT_S = 300.0
#: What a gateway may be in all, and what python:3.12-slim is of that, in MB of 10**6 bytes.
GATEWAY_MB = 250
SLIM_MB = 125
GATEWAY_HAS_NOT = ("torch", "transformers", "triton", "matplotlib", "numpy", "pip")


@dataclass
class Report:
    """What was found, for people: rows of the summary."""

    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, what: str, found: str) -> None:
        print(f"{what}: {found}", flush=True)
        self.rows.append((what, found))

    def text(self) -> str:
        lines = ["| Step | Result |", "|---|---|"]
        return "\n".join([*lines, *(f"| {what} | {found} |" for what, found in self.rows)]) + "\n"


class Failed(Exception):
    """Something does not hold."""


def require(holds: object, what: str) -> None:
    """Raises Failed."""
    if not holds:
        raise Failed(what)


@cache
def is_reached(url: str) -> bool:
    """Whether a server answers there."""
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=10):
            return True
    except OSError:
        return False


@dataclass(frozen=True)
class Images:
    """How images are built. base: the image of Python. arguments: of every build."""

    engine: Engine
    base: str
    report: Report

    def build(
        self, service: str, tag: str, *, context: Path = ROOT, target: str | None = None
    ) -> float:
        """Build what compose.yaml's service runs on, or `target` as it would be built; the seconds
        that it took."""
        services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
        seen = services[service]["build"]
        arguments = dict(seen.get("args", {}))
        if arguments.get("TORCH") == "cpu" and not is_reached(arguments["TORCH_INDEX_URL"]):
            # Who does not reach the index of the CPU builds has them among wheels of their own, or
            # not at all.
            on_gpu = services["decode-gpu"]["build"]["args"]
            arguments["TORCH_INDEX_URL"] = on_gpu["TORCH_INDEX_URL"]
        arguments["PYTHON_IMAGE"] = self.base
        flags = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        start = time.monotonic()
        self.engine.docker(
            *(
                "build",
                "--network=host",
                f"--target={target or seen['target']}",
                f"--tag={tag}",
            ),
            *flags,
            str(context),
        )
        return time.monotonic() - start

    def size_mb(self, image: str) -> float:
        seen = self.engine.docker("image", "inspect", "--format={{.Size}}", image)
        return int(seen.stdout) / 1e6

    def layers(self, image: str) -> list[str]:
        seen = self.engine.docker("image", "inspect", "--format={{json .RootFS.Layers}}", image)
        layers: list[str] = json.loads(seen.stdout)
        return layers

    def python(self, image: str, code: str, *options: str) -> str:
        """What a container of the image prints, confined as compose.yaml confines it."""
        confined = (
            "--read-only",
            "--cap-drop=ALL",
            "--tmpfs=/tmp:exec,mode=1777",
            "--network=none",
        )
        given = (
            "run",
            "--rm",
            *confined,
            "--env=HOME=/tmp",
            *options,
            "--entrypoint=python",
            image,
        )
        return self.engine.docker(*given, "-c", code).stdout.strip()


def build_images(images: Images) -> None:
    """All that the CPU profile runs on; what is in them, and what is not."""
    report = images.report
    base_mb = images.size_mb(images.base)
    for service, tag in (
        ("gateway", "baton:gateway"),
        ("bench", "baton:bench"),
        ("prefill", "baton:cpu"),
    ):
        seconds = images.build(service, tag)
        added_mb = images.size_mb(tag) - base_mb
        report.add(f"build {tag}", f"{seconds:.0f} s; {added_mb:.0f} MB above the base image")
        uid = images.python(tag, "import os; print(os.getuid())")
        require(uid == "10001", f"{tag} runs as user {uid}")
        if service == "gateway":
            require(added_mb + SLIM_MB <= GATEWAY_MB, f"{tag} adds {added_mb:.0f} MB")
            report.add(
                "gateway image",
                f"{added_mb + SLIM_MB:.0f} MB on a slim Python image of {SLIM_MB} MB; at most "
                f"{GATEWAY_MB}",
            )
    find = "from importlib.util import find_spec; print([n for n in {} if find_spec(n)])"
    found = images.python("baton:gateway", find.format(GATEWAY_HAS_NOT))
    require(found == "[]", f"the gateway's image has {found}")
    report.add("not in the gateway image", ", ".join(GATEWAY_HAS_NOT))
    load = ("--workdir=/opt/baton-bench", "--entrypoint=python", "baton:bench", "-m", "bench.load")
    images.engine.docker("run", "--rm", "--read-only", *load, "--help")
    kernels = (
        "import torch; from baton_kernels.cpu.library import library; print(library() is not None)"
    )
    is_native = images.python("baton:cpu", kernels)
    report.add(
        "native kernels", "prebuilt ones load" if is_native == "True" else "none for this CPU"
    )
    stale = (
        "import importlib.util as u, importlib._bootstrap_external as b, sys, pathlib, sysconfig\n"
        "n = 0\n"
        "for root in (sysconfig.get_path('stdlib'), *sys.path[1:]):\n"
        "  for p in pathlib.Path(root).glob('*.py'):\n"
        "    c = pathlib.Path(u.cache_from_source(str(p)))\n"
        "    t = int(p.stat().st_mtime) & 0xffffffff\n"
        "    n += not c.is_file() or int.from_bytes(c.read_bytes()[8:12], 'little') != t\n"
        "print(n)"
    )
    for tag in ("baton:gateway", "baton:cpu"):
        num_stale = int(images.python(tag, stale))
        require(num_stale < 10, f"{tag}: {num_stale} modules have no bytecode that can be used")


def edit_a_source(images: Images) -> None:
    """Editing a source makes one small layer: what was installed stays."""
    context = OUT / "context"
    shutil.rmtree(context, ignore_errors=True)
    files = run(
        "git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"
    ).stdout
    for name in files.splitlines():
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, context / name, follow_symlinks=False)
    images.build("prefill", "baton:unedited", context=context)
    with (context / "baton" / "errors.py").open("a") as source:
        source.write(f"# {time.time_ns()}\n")
    seconds = images.build("prefill", "baton:edited", context=context)
    before, after = images.layers("baton:unedited"), images.layers("baton:edited")
    changed = [old != new for old, new in zip(before, after, strict=True)]
    require(changed == [False] * (len(changed) - 1) + [True], "an edit changes more than one layer")
    images.engine.docker("rmi", "baton:unedited", "baton:edited")
    report = f"{seconds:.0f} s, one layer of {len(changed)} is new, nothing is installed again"
    images.report.add("build after editing a source", report)


def compile_tritons_driver(images: Images, *, has_cuda: bool) -> None:
    """Triton's own way to its driver module, with the compiler of the GPU image.

    There is no GPU, hence no libcuda: a library that only has its names stands in for it, so that
    the module is compiled, linked and loaded; no function of CUDA's is called. has_cuda: in the
    image as it is shipped, with CUDA's libraries, which are some gigabytes; else beside the CPU
    build of torch.
    """
    if has_cuda:
        tag, service = "baton:gpu", "prefill-gpu"
        seconds = images.build(service, tag)
        images.report.add(f"build {tag}", f"{seconds:.0f} s; {images.size_mb(tag):.0f} MB")
    else:
        tag, service = "baton:gpu-compiler", "prefill"
        images.build(service, "baton:build", target="build")
        images.build(service, "baton:worker-gpu", target="worker-gpu")
        images.engine.docker("build", f"--tag={tag}", "--network=host", "-", stdin=_TRITON_BESIDE)
    found = images.python(tag, _BUILD_DRIVER, "--user=10001:10001")
    require(found.endswith("loaded"), f"Triton's driver module cannot be built: {found[-500:]}")
    images.report.add("Triton's driver in the GPU image", found)


def make_rdma_agent(images: Images, *, has_cuda: bool) -> None:
    """The image for RDMA has NIXL's build for the CUDA that torch has; an agent starts and ends.
    has_cuda: see compile_tritons_driver."""
    tag, service = "baton:rdma", "prefill-gpu" if has_cuda else "prefill"
    seconds = images.build(service, tag, target="worker-rdma")
    images.report.add(f"build {tag}", f"{seconds:.0f} s; {images.size_mb(tag):.0f} MB")
    found = images.python(tag, _MAKE_AGENT, "--user=10001:10001")
    require(found.endswith("makes an agent"), f"NIXL does not start: {found[-500:]}")
    images.report.add("NIXL in the RDMA image", found.splitlines()[-1])


#: Also fails if NIXL is not built for the CUDA that the GPU image's torch is locked to.
_MAKE_AGENT = """
from importlib.metadata import version

import nixl._api as api

agent = api.nixl_agent("a", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
assert len(agent.get_agent_metadata()) > 0
built = api.nixlBind.__name__.partition(".")[0]
print("NIXL", version("nixl-cu13"), "as", built, "makes an agent")
"""

#: With the Triton that the GPU image is locked to.
_TRITON_BESIDE = """
FROM baton:build AS triton
RUN sed -n '/^triton==/,/^[a-z]*==/p' /locks/torch-cuda.txt >/triton.txt \\
    && pip install --require-hashes --target=/triton -r /triton.txt
FROM baton:worker-gpu
COPY --from=triton /triton /opt/triton
ENV PYTHONPATH=/opt/triton
"""

_BUILD_DRIVER = r"""
import os, re, subprocess, sys
from importlib.util import find_spec
from pathlib import Path

folder = Path(find_spec("triton").origin).parent / "backends" / "nvidia"
names = sorted(set(re.findall(r"\bcu[A-Z]\w+", (folder / "driver.c").read_text())))
stub = Path("/tmp/cuda/libcuda.so.1")
stub.parent.mkdir()
source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in names)
link = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(stub)]
subprocess.run(link, input=source, text=True, check=True)
code = (
    "import triton; from triton.backends.nvidia.driver import CudaUtils; CudaUtils();"
    "print('Triton', triton.__version__, 'compiled, linked and loaded')"
)
own = {"LD_LIBRARY_PATH": str(stub.parent), "TRITON_LIBCUDA_PATH": str(stub.parent)}
subprocess.run([sys.executable, "-c", code], env={**os.environ, **own}, check=True)
"""


@dataclass(frozen=True)
class Project:
    """compose.yaml's CPU profile as it runs, apart from other projects of this engine."""

    engine: Engine
    files: tuple[str, ...]
    port: int
    http_port: int
    report: Report

    def compose(self, *arguments: str, check: bool = True) -> str:
        environment = {
            **self.engine.environment,
            "GATEWAY_PORT": str(self.port),
            "GATEWAY_HTTP_PORT": str(self.http_port),
        }
        command = (*self.engine.compose, f"--project-name={PROJECT}", f"--project-directory={ROOT}")
        files = (f"--file={name}" for name in self.files)
        return run(
            *command, *files, "--profile=cpu", *arguments, environment=environment, check=check
        ).stdout

    def container(self, service: str) -> str:
        """Its id."""
        return self.compose("ps", "--quiet", service).strip().splitlines()[-1]

    def state(self, service: str) -> Any:
        seen = self.engine.docker("inspect", "--format={{json .State}}", self.container(service))
        return json.loads(seen.stdout)

    def num_restarts(self, service: str) -> int:
        seen = self.engine.docker("inspect", "--format={{.RestartCount}}", self.container(service))
        return int(seen.stdout)

    def is_restarted(self, service: str, num_restarts: int) -> bool:
        """Whether the engine has started it again since it had started it so many times."""
        return self.num_restarts(service) > num_restarts

    def kill(self, service: str) -> None:
        """SIGKILL to all of a container, from outside: by the engine's own command it would not be
        started again."""
        pid = self.state(service)["Pid"]
        outside = (
            "--pid=host",
            "--user=0",
            "--network=none",
            "--entrypoint=python",
            "baton:gateway",
        )
        self.engine.docker("run", "--rm", *outside, "-c", f"import os; os.kill({pid}, 9)")

    def ask(self, **options: Any) -> Completion:
        """A completion from the host, by the published port. Raises BatonError."""
        with Client(f"127.0.0.1:{self.port}", timeout_s=60.0) as client:
            # A salt of its own: nothing of the prompt is in any cache.
            return client.generate(
                PROMPT, ignore_eos=True, cache_salt=str(time.monotonic_ns()), **options
            )

    def ask_by_http(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What OpenAI's API answers, by the other published port. Raises Failed."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        url = f"http://127.0.0.1:{self.http_port}{path}"
        request = urllib.request.Request(url, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60.0) as answer:
                return json.load(answer)
        except OSError as error:
            raise Failed(f"{path} by HTTP: {error}") from None


def is_handed_over(answer: Completion) -> bool:
    """Whether one worker read the prompt, and another went on with its KV."""
    timing = answer.timing
    return timing.transfer_bytes > 0 and (timing.prefill_worker, timing.decode_worker) == (
        "prefill-0",
        "decode-0",
    )


def wait_for(what: str, holds: Callable[[], bool]) -> float:
    """Seconds until it holds. Raises Failed after RECOVERY_TIMEOUT_S."""
    start = time.monotonic()
    while not holds():
        require(
            time.monotonic() - start < RECOVERY_TIMEOUT_S,
            f"{what}: not so after {RECOVERY_TIMEOUT_S:.0f} s",
        )
        time.sleep(0.2)
    return time.monotonic() - start


def answers_handed_over(project: Project) -> bool:
    """Whether a prompt is answered by both tiers now."""
    try:
        return is_handed_over(project.ask(max_tokens=4))
    except BatonError:
        return False


def start_and_ask(project: Project) -> None:
    """Up, healthy, and a prompt that one container hands to another through shared memory."""
    start = time.monotonic()
    project.compose("up", "--detach", "--no-build")
    wait_for("a prompt is handed over", lambda: answers_handed_over(project))
    project.report.add(
        "compose up to a first answer by both tiers", f"{time.monotonic() - start:.1f} s"
    )
    wait_for(
        "all are healthy",
        lambda: all(project.state(name)["Health"]["Status"] == "healthy" for name in SERVICES),
    )
    project.report.add("compose up to all healthy", f"{time.monotonic() - start:.1f} s")
    answer = project.ask(max_tokens=16, temperature=0.0)
    require(is_handed_over(answer), f"not handed over: {answer.timing}")
    require(answer.usage.completion_tokens == 16, "tokens are missing")
    logs = project.compose("logs", "--no-color")
    require("KV goes over shm" in logs, "KV does not go through shared memory")
    project.report.add(
        "a prompt handed over between containers",
        f"{answer.timing.transfer_bytes / 1024:.0f} KiB through shared memory, "
        f"first token after {answer.timing.time_to_first_token_ms:.0f} ms",
    )
    (model,) = project.ask_by_http("/v1/models")["data"]
    body = {"model": model["id"], "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    body |= {"ignore_eos": True, "cache_salt": str(time.monotonic_ns())}
    by_http = project.ask_by_http("/v1/completions", body)
    require(by_http["choices"][0]["text"] == answer.text, f"another answer by HTTP: {by_http}")
    num_tokens = by_http["usage"]["completion_tokens"]
    project.report.add("the same prompt by HTTP", f"the same {num_tokens} tokens of {model['id']}")
    inside = project.compose("exec", "-T", "gateway", "baton", "status")
    require("decode-0" in inside, f"baton status in the gateway's container: {inside}")


def kill_each(project: Project) -> None:
    """Each container is killed and comes back; the answer stays the same."""
    expected = project.ask(max_tokens=32, seed=7, temperature=0.8)
    for service in SERVICES:
        before = project.num_restarts(service)
        project.kill(service)
        start = time.monotonic()
        if service == "redis":
            require(answers_handed_over(project), "no answer while Redis is down")
        wait_for(f"{service} is started again", partial(project.is_restarted, service, before))
        wait_for(f"{service} is back", lambda: answers_handed_over(project))
        seconds = time.monotonic() - start
        answer = project.ask(max_tokens=32, seed=7, temperature=0.8)
        require(answer.choices[0].token_ids == expected.choices[0].token_ids, "another answer")
        project.report.add(
            f"kill -9 of {service}", f"answers by both tiers again after {seconds:.1f} s"
        )


def drain(project: Project) -> None:
    """A request that runs when all is stopped gets all of its tokens, and every process ends by
    itself."""
    containers = {service: project.container(service) for service in SERVICES}
    with ThreadPoolExecutor(1) as pool:
        with Client(f"127.0.0.1:{project.port}", timeout_s=60.0) as client:
            stream = client.stream(PROMPT, max_tokens=400, ignore_eos=True)
            chunks = iter(stream)
            num_tokens = len(next(chunks).token_ids)
            stopping = pool.submit(project.compose, "stop")
            num_tokens += sum(len(chunk.token_ids) for chunk in chunks)
        stopping.result()
    require(num_tokens == 400, f"{num_tokens} tokens of 400 came")
    for service, container in containers.items():
        seen = project.engine.docker("inspect", "--format={{.State.ExitCode}}", container)
        require(int(seen.stdout) == 0, f"{service} ended with {seen.stdout.strip()}")
    project.report.add(
        "stop while a request runs", "all of its 400 tokens came; every container ended with 0"
    )


def read_logs(project: Project) -> None:
    """Each line of Baton's is JSON, and none is an error that nobody caused."""
    num_lines = 0
    for service in SERVICES:
        text = project.engine.docker("logs", project.container(service)).stdout
        (OUT / f"{service}.log").write_text(text)
        if service == "redis":
            continue
        for line in text.splitlines():
            require(line.startswith("{"), f"{service} writes a line that is not JSON: {line[:200]}")
            seen = json.loads(line)
            require(
                seen["level"] != "error" and "exception" not in seen,
                f"{service}: {line[:500]}",
            )
            num_lines += 1
    project.report.add("logs", f"{num_lines} lines of JSON, no error, no traceback")


@contextmanager
def running_project(engine: Engine, redis: str, report: Report) -> Iterator[Project]:
    """compose.yaml with the images that were built, on free ports; taken down at the end, its
    volumes too."""
    override = OUT / "override.yaml"
    own = {"BATON_MAX_LOCAL_PREFILL_TOKENS": MAX_LOCAL_PREFILL_TOKENS}
    services = {"redis": {"image": redis}, "decode": {"environment": own}}
    override.write_text(yaml.safe_dump({"services": services}))
    with (
        socket.create_server(("127.0.0.1", 0)) as grpc,
        socket.create_server(("127.0.0.1", 0)) as http,
    ):
        port, http_port = grpc.getsockname()[1], http.getsockname()[1]
    files = (str(ROOT / "compose.yaml"), str(override))
    project = Project(engine, files, port, http_port, report)
    try:
        yield project
    finally:
        (OUT / "compose.log").write_text(project.compose("logs", "--no-color", check=False))
        project.compose("down", "--volumes", "--timeout=5", check=False)
    left = engine.docker("ps", "--all", "--quiet", f"--filter=name={PROJECT}").stdout
    left += engine.docker("volume", "ls", "--quiet", f"--filter=name={PROJECT}").stdout
    require(not left, f"down leaves {left}")
    report.add("down", "no container and no volume is left")


def versions(engine: Engine, base: str) -> str:
    """What it ran on."""
    server = engine.docker("version", "--format={{.Server.Version}}").stdout.strip()
    compose = run(
        *engine.compose, "version", "--short", environment=engine.environment
    ).stdout.strip()
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    builder = "BuildKit" if engine.environment["DOCKER_BUILDKIT"] == "1" else "the classic builder"
    made = " (made of this machine's Debian)" if is_stand_in(base) else ""
    return (
        f"Docker {server} with {builder}, compose {compose}, Linux {platform.release()}, "
        f"{os.cpu_count()} x {cpu}; base image {base}{made}"
    )


def test_images(arguments: argparse.Namespace, report: Report) -> None:
    """All of it. Raises NoEngine, Failed, subprocess.CalledProcessError, BatonError."""
    with running_engine(arguments.engine_dir, may_install=arguments.install) as engine:
        base = find_base(engine, arguments.python_image, arguments.engine_dir)
        redis = find_base(engine, "redis:7.2-alpine", arguments.engine_dir)
        report.add("on", versions(engine, base))
        images = Images(engine, base, report)
        build_images(images)
        if not arguments.quick:
            edit_a_source(images)
            compile_tritons_driver(images, has_cuda=arguments.cuda)
            make_rdma_agent(images, has_cuda=arguments.cuda)
        with running_project(engine, redis, report) as project:
            start_and_ask(project)
            kill_each(project)
            drain(project)
            read_logs(project)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--install", action="store_true", help="install Debian's engine if there is none"
    )
    parser.add_argument("--cuda", action="store_true", help="build the GPU image with CUDA, too")
    parser.add_argument("--quick", action="store_true", help="only build, run, break and stop")
    parser.add_argument("--python-image", default="python:3.12-slim", help="base image")
    parser.add_argument(
        "--engine-dir",
        type=Path,
        default=Path("/var/tmp/baton-engine"),
        help="where an engine that is started keeps its images",
    )
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    report = Report()
    try:
        test_images(arguments, report)
    except NoEngine as why:
        print(f"make test-images: skipped: {why}")
        return 0
    except (Failed, BatonError) as error:
        report.add("failed", str(error))
        return 1
    except subprocess.CalledProcessError as error:
        report.add("failed", f"{' '.join(error.cmd)}: status {error.returncode}")
        print(error.output[-4000:])
        return 1
    finally:
        (OUT / "summary.md").write_text(report.text())
    print(f"\nAll held. The summary and the logs are in {OUT.relative_to(ROOT)}/.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
