"""``ds_bamboo fleet``: makes, shows and ends spot machines on AWS that run a job.

ds_bamboo fleet up fleet.json --dry-run
ds_bamboo fleet up fleet.json
ds_bamboo fleet status NAME --deepspeed_config ds_config.json
ds_bamboo fleet follow fleet.json --deepspeed_config ds_config.json --down
ds_bamboo fleet prices fleet.json --hours 168
ds_bamboo fleet down NAME
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rich.table import Table

from deepspeed_bamboo.cli.asking import agreed
from deepspeed_bamboo.cli.job import NoSuchJobError, add_job_options, last_end, opened_job, own_etcd
from deepspeed_bamboo.cloud.fleet import ec2_client
from deepspeed_bamboo.cloud.fleet_control import FleetControl, FleetStatus
from deepspeed_bamboo.cloud.fleet_spec import FleetSpec, creating_calls, read_fleet_spec, user_data
from deepspeed_bamboo.cloud.price_history import price_history
from deepspeed_bamboo.errors import BambooError, ConfigError
from deepspeed_bamboo.options import at_least_one, at_most_a_day, file_path, filled
from deepspeed_bamboo.sim.console import print_whole, table_console

if TYPE_CHECKING:
    from deepspeed_bamboo.cli.job_view import JobView
    from deepspeed_bamboo.coordination import EtcdGuard

_NOT_COUNTED = "machines that ended more than about an hour ago, which EC2 no longer lists"
_BOOT_HOURS = 0.1  # younger machines may be on their way into the job


def add_parser(subparsers: Any) -> None:
    """Register `fleet` with the subparsers of ds_bamboo."""
    parser = subparsers.add_parser(
        "fleet",
        help="spot machines on AWS that run a job: up, status, follow, down",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    up = verbs.add_parser("up", help="make the fleet of a spec, or resize it if it exists")
    up.add_argument("spec", metavar="FILE", type=file_path, help="the fleet as JSON; see configs/fleet/aws.json")
    up.add_argument("--dry-run", action="store_true", help="print the calls that make a new fleet, and make none")
    up.add_argument("--keep-surplus", action="store_true", help="let machines above the spec's number run on")
    up.set_defaults(run=run_up)
    status = verbs.add_parser(
        "status",
        help="its machines, and what they cost",
        description="Its machines, and what they cost; where its job is named, also which ones take no part in it.",
    )
    status.add_argument("--json", action="store_true", help="as JSON")
    add_job_options(status, without="default: the job is not looked at")
    status.set_defaults(run=run_status)
    _add_follow(verbs)
    prices = verbs.add_parser("prices", help="what its machines have cost by zone, as the simulator reads it")
    prices.add_argument("spec", metavar="FILE", type=file_path, help="the fleet as JSON")
    prices.add_argument("--hours", type=float, default=24.0, help="until now (default: 24)")
    prices.add_argument("--type", metavar="TYPE", type=filled, help="of the spec's types (default: its first)")
    prices.set_defaults(run=run_prices)
    down = verbs.add_parser("down", help="end all its machines")
    down.set_defaults(run=run_down)
    for verb in (status, down):
        verb.add_argument("name", metavar="NAME", type=filled, help="the fleet's name in its spec")
    for verb in (up, down):
        verb.add_argument("--yes", action="store_true", help="don't ask")
    for verb in (up, prices):
        _add_region(verb)
    for verb in (status, down):
        verb.add_argument(
            "--region",
            type=filled,
            help="that of `up` (its spec's is not known here); default: as boto3 finds it on this machine",
        )
    for verb in (up, status, prices, down):
        verb.add_argument("--endpoint-url", help=argparse.SUPPRESS)


def _add_follow(verbs: Any) -> None:
    follow = verbs.add_parser(
        "follow",
        help="ask for the machines that the job can use, until the job is over",
        description="Asks for the machines that the job can use, until the job is over. Machines above that number are "
        "not ended; they are not replaced when they go.",
    )
    follow.add_argument("spec", metavar="FILE", type=file_path, help="the fleet as JSON; `machines` is the most")
    add_job_options(follow, without="this or the next is needed")
    follow.add_argument(
        "--boot-seconds",
        type=at_most_a_day,
        default=180.0,
        metavar="S",
        help="from a loss to its replacement's first step (default: 180)",
    )
    follow.add_argument(
        "--every-seconds", type=at_most_a_day, default=60.0, metavar="S", help="between two looks (default: 60)"
    )
    follow.add_argument(
        "--least", type=at_least_one, metavar="N", help="machines in any case (default: a worker for each stage)"
    )
    follow.add_argument("--down", action="store_true", help="end the fleet when the job is over")
    _add_region(follow)
    follow.add_argument("--endpoint-url", help=argparse.SUPPRESS)
    follow.set_defaults(run=run_follow)


def _add_region(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--region", type=filled, help="default: the spec's, or as boto3 finds it")


def run_up(arguments: argparse.Namespace) -> int:
    """Make or resize the fleet. Returns the exit code; raises ConfigError and FleetError."""
    spec = read_fleet_spec(arguments.spec)
    if arguments.dry_run:
        now = time.time()
        for call in creating_calls(spec, since_seconds=now):
            print(call)
        print(_where_it_lives(spec, keeps=arguments.keep_surplus))
        print(f"UserData is, in base64:\n{user_data(spec, since_seconds=now)}")
        print(_ceiling(spec, region=arguments.region, machines=spec.machines))
        return 0
    control = _control(arguments, region=spec.region)
    calls = control.calls_up(spec, ends_surplus=not arguments.keep_surplus)
    for call in calls:
        print(f"ec2.{call.method}: {spec.name}, {spec.machines} machines")
    most = spec.machines
    if calls[0].method == "modify_fleet":
        status = control.status(spec.name)
        print(_of_resizing(spec, status, keeps=arguments.keep_surplus))
        most = max(most, status.running) if arguments.keep_surplus else most
    print(_ceiling(spec, region=arguments.region, machines=most))
    if not _agreed(arguments, "Make these calls? They cost money."):
        return 1
    made = control.up(spec, ends_surplus=not arguments.keep_surplus)
    shown = _command("status", spec, region=arguments.region)
    ends = _command("down", spec, region=arguments.region)
    print(f"fleet {spec.name} is {made}; `{shown}` shows its machines, and `{ends}` ends them")
    return 0


def _where_it_lives(spec: FleetSpec, *, keeps: bool) -> str:
    """What `up` does instead of the calls that make a fleet, in words. AWS is not asked whether that is so."""
    surplus = "lets machines above that run on" if keeps else "ends machines above that at once"
    return (
        f"where a fleet {spec.name} lives already, `up` makes none of these calls: by modify_fleet it asks for "
        f"{spec.machines} machines and {surplus}, or refuses where the spec differs in more"
    )


def _of_resizing(spec: FleetSpec, status: FleetStatus, *, keeps: bool) -> str:
    """What a new number of machines means for those that run, in words."""
    now = f"{status.running} machines run, and {status.wanted} were asked for until now"
    surplus = status.running - spec.machines
    if surplus <= 0:
        return now
    if keeps:
        return f"{now}; {surplus} of them are above {spec.machines}: they run on, and are not replaced when they go"
    return (
        f"{now}; AWS ends {surplus} of them at once, whichever it likes, also those that hold a stage and its shadow, "
        "which can cost the steps since the last checkpoint. To keep them for now: --keep-surplus. To have some leave "
        "first: ds_bamboo drain NODE, then end them in the AWS console"
    )


def _command(verb: str, spec: FleetSpec, *, region: str | None) -> str:
    """The command for this fleet, with the region that it is in; the environment may say another, or none."""
    where = region or spec.region
    return f"ds_bamboo fleet {verb} {spec.name}" + (f" --region {where}" if where else "")


def _ceiling(spec: FleetSpec, *, region: str | None, machines: int) -> str:
    """What the fleet may cost with so many ``machines``, in words."""
    until = f"until `{_command('down', spec, region=region)}` ends it, also when the job is complete"
    each = spec.max_dollars_per_machine_hour
    if each is None:
        return f"no max_dollars_per_machine_hour: each machine may cost up to its on-demand price, {until}"
    return (
        f"the fleet costs ${each * machines:.2f} an hour at most ({machines} machines of ${each:g}), without disks and "
        f"traffic, {until}"
    )


def run_status(arguments: argparse.Namespace) -> int:
    """Show the fleet, and which machines take no part where a job is named. Returns the exit code; raises FleetError.

    Raises what :func:`opened_job` does, but for NoSuchJobError.
    """
    from deepspeed_bamboo.cli.fleet_idle import idle_line, idle_of

    of_a_job = arguments.job or arguments.endpoints or arguments.deepspeed_config
    if of_a_job:
        own_etcd(arguments)
    control = _control(arguments)
    status = control.status(arguments.name)
    why = control.why_missing(status) if status.running < status.wanted else None
    count, idle = 0, list[str]()
    if of_a_job:
        view = None
        with contextlib.suppress(NoSuchJobError):
            view = _view(arguments, arguments.job)
        count, idle = idle_of(status, view, least_hours=_BOOT_HOURS)
    if arguments.json:
        dollars = {"dollars_per_hour": status.dollars_per_hour, "dollars_so_far": status.dollars_so_far}
        missing = {"running": status.running, "without_price": status.without_price, "why_missing": why}
        without_part = {"without_part": count, "perhaps_without_part": idle}
        told = {**dataclasses.asdict(status), **dollars, "not_counted": _NOT_COUNTED, **missing, **without_part}
        print(json.dumps(told, indent=1))
        return 0
    _print(arguments.name, status)
    if why is not None:
        print(f"machines are missing; AWS says: {why}")
    if count:
        print(idle_line(count, idle, status))
    return 0


def _view(arguments: argparse.Namespace, job: str | None) -> JobView:
    """The job of that name where the options say."""
    from deepspeed_bamboo.cli.job_view import look

    with opened_job(argparse.Namespace(**{**vars(arguments), "job": job})) as coordinator:
        return look(coordinator)


def run_follow(arguments: argparse.Namespace) -> int:
    """Follow the job until it is over. Returns the exit code; raises ConfigError and FleetError."""
    from deepspeed_bamboo.cli.fleet_follow import Follower, end_fleet, follow
    from deepspeed_bamboo.cli.followed_job import FollowedJob
    from deepspeed_bamboo.cli.unattended import Signalled, Voice, signals_raised

    spec, every = read_fleet_spec(arguments.spec), arguments.every_seconds
    if arguments.least is not None and arguments.least > spec.machines:
        raise ConfigError(f"--least is {arguments.least}, and the spec's `machines` {spec.machines}; raise that")
    endpoints, guard = own_etcd(arguments)
    control = _control(arguments, region=spec.region)
    control.check_rights(spec.name, down=arguments.down)
    ends = _command("down", spec, region=arguments.region)
    follower = Follower(
        spec.machines, arguments.boot_seconds, micro_batches=_micro_batches(arguments), least=arguments.least
    )
    job = FollowedJob(
        lambda name: _view(arguments, name),
        lambda name: last_end(argparse.Namespace(**{**vars(arguments), "job": name})),
        name=arguments.job,
    )
    Voice().say(_what_is_followed(arguments, spec, endpoints, guard))
    try:
        with signals_raised():
            there = follow(job, control, follower, name=spec.name, every_seconds=every)
            if there and arguments.down:
                end_fleet(control, name=spec.name, every_seconds=every)
            elif there:
                Voice().say(f"fleet {spec.name} runs on, and costs, until `{ends}` ends it")
    except (Signalled, KeyboardInterrupt, BambooError) as ended:
        with contextlib.suppress(OSError):
            text = f"fleet {spec.name} is not followed any more; it runs on, and costs, until `{ends}` ends it"
            print(f"ds_bamboo: {text}", file=sys.stderr, flush=True)
        if isinstance(ended, BambooError):
            raise
        return 128 + (ended.number if isinstance(ended, Signalled) else signal.SIGINT)
    return 0


def _micro_batches(arguments: argparse.Namespace) -> Callable[[int], int | None]:
    """Of each pipeline and step by the number of pipelines, where a configuration says so."""
    from deepspeed_bamboo.doctor.settings import micro_batches_of
    from deepspeed_bamboo.elastic.settings_source import settings_in

    config = arguments.deepspeed_config
    settings = {} if config is None else settings_in(config)
    return lambda pipelines: micro_batches_of(settings, pipelines=pipelines)


def _what_is_followed(arguments: argparse.Namespace, spec: FleetSpec, etcd: list[str], guard: EtcdGuard) -> str:
    """What was asked for and what is assumed, in words."""
    job = "the only job" if arguments.job is None else f"job {arguments.job}"
    assumed = (
        f"micro-batches as in {arguments.deepspeed_config}"
        if arguments.deepspeed_config
        else "four micro-batches for each stage, as no configuration is named"
    )
    text = (
        f"fleet {spec.name}, at most {spec.machines} machines, follows {job} at {','.join(etcd)}: a look every "
        f"{arguments.every_seconds:g} s; {arguments.boot_seconds:g} s to a new machine's first step; {assumed}"
    )
    if guard.username is None and guard.cert is None:
        ends = " and end it" if arguments.down else ""
        text += f"\nthat etcd asks for no password: whoever reaches it can resize this fleet{ends}"
    return text


def run_prices(arguments: argparse.Namespace) -> int:
    """Print a price history. Returns the exit code; raises ConfigError and FleetError."""
    spec = read_fleet_spec(arguments.spec)
    ec2 = ec2_client(region=arguments.region or spec.region, endpoint_url=arguments.endpoint_url)
    kind, now = arguments.type or spec.instance_types[0], datetime.now(timezone.utc)
    for line in price_history(ec2, spec, instance_type=kind, hours=arguments.hours, now=now):
        print(line)
    return 0


def run_down(arguments: argparse.Namespace) -> int:
    """End the fleet. Returns the exit code; raises FleetError."""
    control = _control(arguments)
    status = control.status(arguments.name)
    print(f"fleet {arguments.name} ({status.fleet}) has {status.running} machines")
    if not _agreed(arguments, "End them all?"):
        return 1
    control.down(arguments.name)
    cost = f"its machines have cost about ${status.dollars_so_far:.2f}{_unpriced(status)}, without {_NOT_COUNTED}"
    print(f"fleet {arguments.name} is ending; {cost}")
    return 0


def _control(arguments: argparse.Namespace, *, region: str | None = None) -> FleetControl:
    return FleetControl(ec2_client(region=arguments.region or region, endpoint_url=arguments.endpoint_url))


def _agreed(arguments: argparse.Namespace, question: str) -> bool:
    if arguments.yes:
        return True
    return agreed(question, otherwise=ConfigError(f"{question} There is no terminal to answer on; add --yes"))


def _print(name: str, status: FleetStatus) -> None:
    table = Table(title=f"fleet {name} ({status.state}), {status.running} of {status.wanted} machines")
    for heading in ("machine", "type", "zone", "state", "hours", "$/h"):
        table.add_column(heading, justify="right" if heading in ("hours", "$/h") else "left")
    for one in status.machines:
        price = "?" if one.dollars_per_hour is None else f"{one.dollars_per_hour:.3f}"
        table.add_row(one.instance, one.instance_type, one.zone, one.state, f"{one.hours:.2f}", price)
    console = table_console()
    print_whole(table, console)
    print(
        f"${status.dollars_per_hour:.2f} an hour, ${status.dollars_so_far:.2f} so far, at today's spot prices"
        f"{_unpriced(status)}, and without {_NOT_COUNTED}"
    )


def _unpriced(status: FleetStatus) -> str:
    return f", without {status.without_price} machines for which AWS names no price" if status.without_price else ""
