"""What the commands do that are about runs, checkpoints, and machines."""

import sys
from argparse import Namespace

from polyad.data.files import write_whole
from polyad.launch.machine import is_main
from polyad.launch.output import check_json_path, only_results_on_stdout, show


def train(options: Namespace) -> None:
    """`polyad train`."""
    from polyad.launch.machine import bind_to_cores, end_with_launcher, prepare_environment
    from polyad.launch.tables import trained_table
    from polyad.launch.torchrun import forget_stop

    launched = end_with_launcher()
    bind_to_cores()
    forget_stop()
    prepare_environment()
    from polyad.parallel import comm
    from polyad.train.pretrain import main as train

    with only_results_on_stdout() as stdout:
        state = train(options.config, options.overrides, launched=launched)
        if is_main():
            stdout.write(trained_table(state, options.config, options.overrides) + "\n")
        comm.shutdown()


def launch(options: Namespace) -> int:
    """`polyad launch`."""
    from polyad.launch.machine import end_with_launcher
    from polyad.launch.via.options import launch_from

    end_with_launcher()
    return launch_from(options)


def validate(options: Namespace) -> None:
    """`polyad validate`."""
    from polyad.parallel.comm import environment_world_size
    from polyad.train.forecast.describe import describe_run, description_table

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        description = describe_run(
            options.config,
            options.overrides,
            options.processes or environment_world_size(),
            with_data=not options.without_data,
        )
        show(description, description_table(description), options.json, stdout)


def checkpoint_list(options: Namespace) -> None:
    """`polyad checkpoint list`."""
    from polyad.launch.checkpoints import checkpoint_table, list_checkpoints

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = list_checkpoints(options.folder)
        show(result, checkpoint_table(result), options.json, stdout)


def checkpoint_verify(options: Namespace) -> int:
    """`polyad checkpoint verify`."""
    from polyad.launch.checkpoints import checkpoint_table, verify_checkpoints

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = verify_checkpoints(options.folder)
        show(result, checkpoint_table(result), options.json, stdout)
    return 0 if result["good"] else 2


def checkpoint_delete(options: Namespace) -> None:
    """`polyad checkpoint delete`."""
    from polyad.launch.checkpoints import checkpoint_table, delete_checkpoints

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        last_too = options.even_the_last_good
        result = delete_checkpoints(options.folders, even_the_last_good=last_too)
        show(result, checkpoint_table(result), options.json, stdout)


def schema(options: Namespace) -> None:
    """`polyad schema`."""
    from polyad.launch.schema import schema_text

    sys.stdout.write(schema_text(options.kind))


def doctor(options: Namespace) -> int:
    """`polyad doctor`."""
    from polyad.launch.doctor.command import check, examine, in_a_group, table
    from polyad.launch.machine import end_with_launcher, prepare_environment
    from polyad.launch.via.options import launch_from

    check_json_path(options.json)
    end_with_launcher()
    if not in_a_group():
        if options.processes_per_node is None and options.via != "ssh":
            options.processes_per_node = 1
        words = ["--json", options.json] if options.json else []
        return launch_from(options, ("doctor", *words))
    prepare_environment()
    with only_results_on_stdout() as stdout:
        result = examine(options.config, options.overrides)
        if result is not None:
            show(result, table(result), options.json, stdout)
            check(result)
    return 0


def verify_layout(options: Namespace) -> None:
    """`polyad verify-layout`."""
    from polyad.launch.verify_layout import (
        become_processes,
        check,
        check_processes,
        table,
        verify_layout,
    )
    from polyad.parallel.comm import environment_world_size

    check_json_path(options.json)
    found = environment_world_size()
    processes = check_processes(options.processes, found)
    if found == 1:
        from polyad.train.config.run import load_config
        from polyad.train.layout.small import small_config

        small_config(load_config(options.config, options.overrides), processes)
        words = [str(options.config), "--processes", str(processes)]
        words += ["--json", options.json] if options.json else []
        become_processes([*words, *options.overrides], processes)
    with only_results_on_stdout() as stdout:
        result = verify_layout(options.config, options.overrides, processes)
        if result is not None:
            show(result, table(result), options.json, stdout)
            check(result)


def plan(options: Namespace) -> None:
    """`polyad plan`."""
    from polyad.launch.plan.command import (
        HERE,
        become_processes,
        check,
        check_options,
        configuration,
        plan,
        plan_here,
    )
    from polyad.launch.plan.table import table
    from polyad.launch.study.figure import check_figure
    from polyad.parallel.comm import environment_world_size
    from polyad.parallel.plan.devices import DEVICES
    from polyad.train.forecast.forecast import Machines

    check_json_path(options.json)
    if options.figure:
        check_figure(options.figure, dry_run=False)
    check_options(options)
    processes = options.nodes * options.processes_per_node
    config = configuration(options.config, options.overrides, processes)
    if options.device == HERE:
        if processes > 1 and environment_world_size() == 1:
            become_processes(options)
        with only_results_on_stdout() as stdout:
            here = plan_here(config, processes, check_steps=options.check or 0)
            if here is not None:
                show(here, table(here), options.json, stdout)
        return
    machines = Machines(
        device=DEVICES[options.device],
        nodes=options.nodes,
        processes_per_node=options.processes_per_node,
        storage=1e9 * options.storage,
        hours_of_one=options.failures,
    )
    with only_results_on_stdout() as stdout:
        result = plan(
            config,
            machines,
            imbalance=options.imbalance,
            search=options.search,
            scale=options.figure is not None,
        )
        if options.figure:
            from polyad.launch.plan.figure import figure

            write_whole(options.figure, figure(result))
        show(result, table(result), options.json, stdout)
        check(result)
