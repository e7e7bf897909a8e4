"""`megatron-vp patches`: list what this plug-in patches and calls in Megatron, and check the installed version."""

from __future__ import annotations

import typer


def patches(
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Only compare signatures. By default every patch is also applied and removed again.",
    ),
) -> None:
    """List the patches to Megatron-Core and their reasons, and check whether they fit the installed version.

    The command also checks the Megatron functions that the plug-in calls without patching, and the Megatron
    arguments that it reads. If anything does not fit, the output names it, and the exit status is 1. On an unsupported
    release, the command only compares signatures and applies no patch.
    """
    from megatron_vp.mcore import megatron_lock, patch_table
    from megatron_vp.mcore.patches import (
        SUPPORTED_SERIES,
        TESTED_VERSIONS,
        apply,
        fault,
        locked,
        present_series,
        present_version,
        undo,
    )
    from megatron_vp.mcore.platform.flags import quiet_fallback_warnings
    from megatron_vp.mcore.platform.installed import here

    quiet_fallback_warnings()
    here()
    version, supported = present_version(), present_series() in SUPPORTED_SERIES
    problems: list[str] = []
    for group in patch_table.GROUPS:
        declared = group.declared() if group.is_present() else ()
        faults = {patch.target: said for patch in declared if (said := fault(patch))}
        problems += faults.values()
        if supported and not faults and not dry_run:
            undo(apply(declared))
        typer.echo(f"{group.name}: {group.sentence}; applied {group.stage}; without it, {group.without}")
        for patch in declared:
            typer.echo(f"  {'DOES NOT FIT' if patch.target in faults else 'fits'}  {patch.target}  ({patch.reason})")
        if not declared:
            typer.echo("  nothing is patched")
    for subject, names, found in (
        ("symbols that the plug-in uses", locked("used"), megatron_lock.changed_symbols()),
        ("options that the plug-in reads", locked("option"), megatron_lock.missing_options()),
    ):
        problems += found
        typer.echo(f"Megatron {subject}: {len(names) - len(found)} of {len(names)} fit")
    for problem in problems:
        typer.echo(problem)
    subject = "item does" if len(problems) == 1 else "items do"
    verdict = f"{len(problems)} {subject} not fit" if problems else "all patches fit"
    status = "tested versions" if supported else "not supported, so no run will start; tested versions"
    typer.echo(f"{verdict} megatron-core {version} ({status}: {', '.join(TESTED_VERSIONS)})")
    if problems or not supported:
        raise typer.Exit(1)
