"""From the runs of a comparison to its tables.

A run is one engine in one round: {"model", "threads", "round", "engine", "version", "rates", "limits", "work", "machine",
"first_token_s", "peak_rss_gb", "error"}; class Figures says what they hold. Ratios are taken round by round, so that what
a shared machine gives and takes between rounds cancels; the median of them is shown.
"""
import os
import statistics


def in_order(values):
    return list(dict.fromkeys(values))


def is_mode_of(engine, family):
    """"llama.cpp, no repack" and "ik -rtr" are modes of "llama.cpp" and "ik"."""
    return engine == family or engine.startswith((f"{family},", f"{family} "))


class Cell:
    """All runs of one model at one number of threads."""

    def __init__(self, runs):
        self.runs = runs
        self.engines = in_order(run["engine"] for run in runs)
        self.names = in_order(name for run in runs for name in run["rates"])

    def rates(self, engine, name):
        """By round."""
        return {run["round"]: run["rates"][name] for run in self.runs if run["engine"] == engine and name in run["rates"]}

    def median(self, engine, name):
        rates = self.rates(engine, name)
        return statistics.median(rates.values()) if rates else None

    def best_of(self, engines, name):
        """The one with the best median, or None."""
        return max((engine for engine in engines if self.rates(engine, name)), default=None,
                   key=lambda engine: self.median(engine, name))

    def base(self, family, name):
        return self.best_of([engine for engine in self.engines if is_mode_of(engine, family)], name)

    def ratio(self, engine, other, name):
        """The median of the ratios of the rounds in which both ran, or None."""
        mine, theirs = self.rates(engine, name), self.rates(other, name)
        ratios = [mine[r] / theirs[r] for r in mine if r in theirs]
        return statistics.median(ratios) if ratios else None

    def limit(self, run, name):
        """The rate that the machine would allow: as the run found it, or from the best that was seen around it, or None."""
        if name in run["limits"]:
            return run["limits"][name]
        work = next((other["work"][name] for other in self.runs if name in other["work"]), None)
        if not work or not run["machine"]:
            return None
        key, amount = work
        return max(machine[key] for machine in run["machine"]) / amount

    def share(self, engine, name):
        """The median share of the limit."""
        runs = [run for run in self.runs if run["engine"] == engine and name in run["rates"] and self.limit(run, name)]
        shares = [run["rates"][name] / self.limit(run, name) for run in runs]
        return statistics.median(shares) if shares else None

    def of_process(self, engine, field):
        found = [run[field] for run in self.runs if run["engine"] == engine and run[field] is not None]
        return statistics.median(found) if found else None

    def machine(self):
        """Every limit's range over the runs."""
        found = [machine for run in self.runs for machine in run["machine"]]
        return {key: (min(m[key] for m in found), max(m[key] for m in found)) for key in (found[0] if found else ())}


def cells(runs):
    keys = in_order((run["model"], run["threads"]) for run in runs)
    return [(model, threads, Cell([run for run in runs if (run["model"], run["threads"]) == (model, threads)]))
            for model, threads in keys]


def number(value):
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def times(value):
    return "" if value is None else f"{value:.2f}"


def percent(value):
    return "" if value is None else f"{100 * value:.0f} %"


def seconds(value):
    return "" if value is None else f"{value:.2f}"


def plural(count, noun):
    return f"{count} {noun}{'s' if count > 1 else ''}"


def rates_table(cell, family):
    rows = [["what", "engine", "tokens/s", "min..max", f"to {family}", "of the limit"]]
    for name in cell.names:
        base = cell.base(family, name)
        label = name
        for engine in cell.engines:
            rates = cell.rates(engine, name).values()
            if not rates:
                continue
            rows.append([label, engine, number(statistics.median(rates)), f"{number(min(rates))}..{number(max(rates))}",
                         times(cell.ratio(engine, base, name)) if base else "", percent(cell.share(engine, name))])
            label = ""
    return rows


def processes_table(cell):
    rows = [["engine", "first token, s", "peak memory, GB"]]
    for engine in cell.engines:
        values = [cell.of_process(engine, field) for field in ("first_token_s", "peak_rss_gb")]
        if any(value is not None for value in values):
            rows.append([engine, *map(seconds, values)])
    return rows


def summary_table(all_cells, subject, family):
    """The subject beside the best mode of the baseline and beside the best of all others."""
    rows = [["model", "threads", "what", f"{subject}, tokens/s", "of the limit", f"to {family}, its best mode",
             "to the best other"]]
    for model, threads, cell in all_cells:
        label = [os.path.basename(model), str(threads)]
        for name in cell.names:
            if not cell.rates(subject, name):
                continue
            versus = [cell.base(family, name), cell.best_of([e for e in cell.engines if not is_mode_of(e, subject)], name)]
            rows.append([*label, name, number(cell.median(subject, name)), percent(cell.share(subject, name)),
                         *(f"{times(cell.ratio(subject, other, name))} ({other})" if other else "" for other in versus)])
            label = ["", ""]
    return rows


def as_text(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    is_text = [i == 0 or not any(row[i][:1].isdigit() for row in rows[1:]) for i in range(len(widths))]
    return "\n".join("  ".join(cell.ljust(width) if left else cell.rjust(width)
                               for cell, width, left in zip(row, widths, is_text)).rstrip() for row in rows)


def as_markdown(rows):
    is_text = [not any(row[i][:1].isdigit() for row in rows[1:]) for i in range(len(rows[0]))]
    rule = ["---" if left else "---:" for left in is_text]
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]])


def report(runs, family, subject, markdown=False):
    """All tables as one text."""
    table = as_markdown if markdown else as_text
    parts, all_cells = [], cells(runs)
    for model, threads, cell in all_cells:
        rounds = len({run["round"] for run in cell.runs})
        title = f"{os.path.basename(model)}, {plural(threads, 'thread')}, {plural(rounds, 'round')}"
        machine = ", ".join(f"{label} {number(low)}..{number(high)}" for key, label in LIMITS.items()
                            for low, high in [cell.machine().get(key, (None, None))] if low is not None)
        parts += [f"### {title}" if markdown else title]
        if machine:
            parts += [f"Limits during the runs: {machine}."]
        versions = in_order((run["engine"], run["version"]) for run in cell.runs if run["version"])
        if versions:
            parts += ["Versions: " + "; ".join(f"{engine}: {version}" for engine, version in versions) + "."]
        parts += [table(rates_table(cell, family))] if cell.names else []
        processes = processes_table(cell)
        parts += [table(processes)] if len(processes) > 1 else []
        for run in cell.runs:
            if run["error"]:
                parts.append(f"{run['engine']}, round {run['round']}: {run['error']}")
    summary = summary_table(all_cells, subject, family)
    if len(summary) > 1:
        parts += ["### In short" if markdown else "in short", table(summary)]
    return "\n\n".join(parts) + "\n"


LIMITS = {"read_gbps": "read GB/s", "f32_gops": "f32 Gop/s", "bf16_gops": "bf16", "int8_gops": "int8"}
