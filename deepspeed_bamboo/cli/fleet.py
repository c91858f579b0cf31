"""``ds_bamboo fleet``: makes, shows and ends spot machines on AWS that run a job.

ds_bamboo fleet up fleet.json --dry-run
ds_bamboo fleet up fleet.json
ds_bamboo fleet status NAME
ds_bamboo fleet follow fleet.json --deepspeed_config ds_config.json --down
ds_bamboo fleet prices fleet.json --hours 168
ds_bamboo fleet down NAME
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from datetime import datetime, timezone
from typing import Any

from rich.console import Console
from rich.table import Table

from deepspeed_bamboo.cli.asking import agreed
from deepspeed_bamboo.cli.job import add_job_options, opened_job
from deepspeed_bamboo.cloud.fleet import ec2_client
from deepspeed_bamboo.cloud.fleet_control import FleetControl, FleetStatus
from deepspeed_bamboo.cloud.fleet_spec import FleetSpec, creating_calls, read_fleet_spec, user_data
from deepspeed_bamboo.cloud.price_history import price_history
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.options import file_path, positive


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
    up.add_argument("--dry-run", action="store_true", help="print every call without making it")
    up.set_defaults(run=run_up)
    status = verbs.add_parser("status", help="its machines, and what they cost")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.set_defaults(run=run_status)
    follow = verbs.add_parser("follow", help="ask for the machines that the job can use, until the job is over")
    follow.add_argument("spec", metavar="FILE", type=file_path, help="the fleet as JSON; `machines` is the most")
    add_job_options(follow)
    follow.add_argument(
        "--boot-seconds",
        type=positive,
        default=180.0,
        metavar="S",
        help="from a loss to its replacement's first step",
    )
    follow.add_argument("--every-seconds", type=positive, default=60.0, metavar="S", help="between two looks")
    follow.add_argument("--down", action="store_true", help="end the fleet when the job is over")
    follow.set_defaults(run=run_follow)
    prices = verbs.add_parser("prices", help="what its machines have cost by zone, as the simulator reads it")
    prices.add_argument("spec", metavar="FILE", type=file_path, help="the fleet as JSON")
    prices.add_argument("--hours", type=float, default=24.0, help="until now (default: 24)")
    prices.add_argument("--type", metavar="TYPE", help="of the spec's types (default: its first)")
    prices.set_defaults(run=run_prices)
    down = verbs.add_parser("down", help="end all its machines")
    down.set_defaults(run=run_down)
    for verb in (status, down):
        verb.add_argument("name", metavar="NAME", help="the fleet's name in its spec")
    for verb in (up, down):
        verb.add_argument("--yes", action="store_true", help="don't ask")
    for verb in (up, follow, prices):
        verb.add_argument("--region", help="default: the spec's, or as boto3 finds it")
    for verb in (status, down):
        verb.add_argument(
            "--region", help="that of `up` (its spec's is not known here); default: as boto3 finds it on this machine"
        )
    for verb in (up, status, follow, prices, down):
        verb.add_argument("--endpoint-url", help=argparse.SUPPRESS)


def run_up(arguments: argparse.Namespace) -> int:
    """Make or resize the fleet. Returns the exit code; raises ConfigError and FleetError."""
    spec = read_fleet_spec(arguments.spec)
    if arguments.dry_run:
        for call in creating_calls(spec):
            print(call)
        print(f"UserData is, in base64:\n{user_data(spec)}")
        print(_ceiling(spec, region=arguments.region))
        return 0
    control = _control(arguments, region=spec.region)
    for call in control.calls_up(spec):
        print(f"ec2.{call.method}: {spec.name}, {spec.machines} machines")
    print(_ceiling(spec, region=arguments.region))
    if not _agreed(arguments, "Make these calls? They cost money."):
        return 1
    made = control.up(spec)
    shown = _command("status", spec, region=arguments.region)
    ends = _command("down", spec, region=arguments.region)
    print(f"fleet {spec.name} is {made}; `{shown}` shows its machines, and `{ends}` ends them")
    return 0


def _command(verb: str, spec: FleetSpec, *, region: str | None) -> str:
    """The command for this fleet, with the region that it is in; the environment may say another, or none."""
    where = region or spec.region
    return f"ds_bamboo fleet {verb} {spec.name}" + (f" --region {where}" if where else "")


def _ceiling(spec: FleetSpec, *, region: str | None) -> str:
    """What the fleet may cost, in words."""
    most = spec.max_dollars_per_fleet_hour
    until = f"until `{_command('down', spec, region=region)}` ends it, also when the job is complete"
    if most is None:
        return f"no max_dollars_per_machine_hour: each machine may cost up to its on-demand price, {until}"
    each = spec.max_dollars_per_machine_hour
    return (
        f"the fleet costs ${most:.2f} an hour at most ({spec.machines} machines of ${each:g}), without disks and "
        f"traffic, {until}"
    )


def run_status(arguments: argparse.Namespace) -> int:
    """Show the fleet. Returns the exit code; raises FleetError."""
    status = _control(arguments).status(arguments.name)
    if arguments.json:
        known = {"dollars_per_hour": status.dollars_per_hour, "dollars_so_far": status.dollars_so_far}
        print(json.dumps({**dataclasses.asdict(status), "running": status.running, **known}, indent=1))
    else:
        _print(arguments.name, status)
    return 0


def run_follow(arguments: argparse.Namespace) -> int:
    """Follow the job until it is over. Returns the exit code; raises ConfigError and FleetError."""
    from deepspeed_bamboo.cli.fleet_follow import Follower, follow
    from deepspeed_bamboo.cli.job_view import JobView, look
    from deepspeed_bamboo.elastic.settings_source import settings_in

    spec, config = read_fleet_spec(arguments.spec), arguments.deepspeed_config
    found = None if config is None else settings_in(config).get("gradient_accumulation_steps")
    control = _control(arguments, region=spec.region)
    follower = Follower(
        most=spec.machines,
        boot_seconds=arguments.boot_seconds,
        interval_seconds=arguments.every_seconds,
        micro_batches=found if isinstance(found, int) and found > 0 else None,
    )

    def view() -> JobView:
        with opened_job(arguments) as coordinator:
            return look(coordinator)

    follow(follower, control, name=spec.name, view=view, every_seconds=arguments.every_seconds)
    if arguments.down:
        control.down(spec.name)
        print(f"fleet {spec.name} is ending, since the job is over")
    return 0


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
    print(f"fleet {arguments.name} is ending; it has cost about ${status.dollars_so_far:.2f}")
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
    console = Console()
    console.print(table)
    console.print(
        f"${status.dollars_per_hour:.2f} an hour, ${status.dollars_so_far:.2f} so far, at today's spot prices",
        highlight=False,
    )
