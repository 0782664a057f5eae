"""Writes a report for people, as one line for each check with the remedy below, and as JSON and Markdown."""

from __future__ import annotations

import json
from itertools import groupby

from hyper_parallel.doctor.finding import Finding, Report, Status

__all__ = ["as_json", "as_markdown", "as_text"]

_MARKS = {Status.OK: "✓", Status.WARNING: "!", Status.FAILURE: "✗", Status.SKIPPED: "-"}
_PLAIN = {Status.OK: "ok", Status.WARNING: "!!", Status.FAILURE: "XX", Status.SKIPPED: "--"}
_COLORS = {Status.OK: "32", Status.WARNING: "33", Status.FAILURE: "31", Status.SKIPPED: "2"}
_PROBLEMS = (Status.WARNING, Status.FAILURE)


def as_text(report: Report, *, verbose: bool = False, color: bool = False, unicode: bool = True) -> str:
    """The report for a terminal.

    Args:
        report: what to write.
        verbose: with details, and with each skipped check of a group that is skipped as a whole.
        color: with colours.
        unicode: with marks that are not ASCII.
    """
    marks = _MARKS if unicode else _PLAIN

    def mark(status: Status) -> str:
        return f"\033[{_COLORS[status]}m{marks[status]}\033[0m" if color else marks[status]

    lines = [_title(report), ""]
    width = max((len(finding.id) for finding in report.findings), default=0)
    for group, members in groupby(report.findings, key=lambda finding: finding.check.group):
        findings = list(members)
        if not verbose and len(findings) > 1 and _one_reason(findings):
            lines.append(f"{mark(Status.SKIPPED)} {group:<{width}}  {findings[0].text} ({len(findings)} checks)")
            continue
        for finding in findings:
            lines.append(f"{mark(finding.status)} {finding.id:<{width}}  {finding.text}")
            if finding.status in _PROBLEMS:
                lines += [f"      {line}" for line in _remedy(finding)]
            if verbose:
                lines += [f"      | {detail}" for detail in finding.details]
    return "\n".join([*lines, "", _summary(report), ""])


def as_markdown(report: Report) -> str:
    """The report as a table and the remedies, to paste into an issue."""
    rows = ["| | check | finding |", "|---|---|---|"]
    for finding in report.findings:
        text = finding.text.replace("|", "\\|").replace("<", "&lt;")
        rows.append(f"| {_MARKS[finding.status]} | `{finding.id}` | {text} |")
    remedies = []
    for finding in report.findings:
        if finding.status in _PROBLEMS:
            remedies += ["", f"**`{finding.id}`**: {finding.text}", "", "```bash", *finding.remedy, "```"]
            if finding.details:
                remedies += ["", "```text", *finding.details, "```"]
    return "\n".join([f"### {_title(report)}", "", *rows, "", _summary(report), *remedies, ""])


def as_json(report: Report) -> str:
    """The report for programs; `schema` rises when a field changes its meaning."""
    content = {
        "schema": 1,
        "subject": report.subject,
        "reason": report.reason,
        "checks": [
            {
                "id": finding.id,
                "group": finding.check.group,
                "title": finding.check.title,
                "status": finding.status.value,
                "finding": finding.text,
                "remedy": list(finding.remedy),
                "details": list(finding.details),
                "page": finding.check.page,
            }
            for finding in report.findings
        ],
        "summary": {status.value: report.count(status) for status in Status},
        "seconds": round(report.seconds, 3),
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _title(report: Report) -> str:
    return f"HyperParallel doctor: {report.subject}" + f" ({report.reason})" * bool(report.reason)


def _remedy(finding: Finding) -> list[str]:
    """Commands behind a `$`, what explains them without, and the page that says more."""
    lines = [line if line.startswith("#") else f"$ {line}" for line in finding.remedy]
    return [*lines, f"see {finding.check.page}"]


def _one_reason(findings: list[Finding]) -> bool:
    """All of them are skipped, for the same reason."""
    return all(finding.status is Status.SKIPPED and finding.text == findings[0].text for finding in findings)


def _summary(report: Report) -> str:
    def counted(status: Status, one: str, many: str) -> str:
        count = report.count(status)
        return f"{count} {one if count == 1 else many}"

    parts = [
        f"{report.count(Status.OK)} ok",
        counted(Status.WARNING, "warning", "warnings"),
        counted(Status.FAILURE, "failure", "failures"),
        f"{report.count(Status.SKIPPED)} skipped",
    ]
    return f"{', '.join(parts)}; {report.seconds:.1f} s"
