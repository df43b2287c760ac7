"""Compiled programs of pipelines, read: the loop over ticks, and which permutes stand where."""

import re


def computations(text):
    """The instructions of each computation of a module, by its name."""
    found, name = {}, None
    for line in text.splitlines():
        start = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if start:
            name = start[1]
            found[name] = []
        elif name and " = " in line:
            found[name].append(line)
    return found


def called(instruction):
    names = re.findall(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)", instruction)
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction)
    return names + (re.findall(r"%?([\w.\-]+)", branches[1]) if branches else [])


def below(name, module):
    """All computations that a computation calls, itself too."""
    seen, todo = set(), [name]
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            todo += [other for line in module[one] for other in called(line)]
    return seen


def permutes(lines):
    return [line for line in lines if re.search(r" collective-permute(-start)?\(", line)]


def ticks_and_permutes(module):
    """(the loop over ticks as an instruction, its permutes, the permutes inside of branches)."""
    inside = [line for lines in module.values() for instruction in lines if " conditional(" in instruction
              for branch in called(instruction) for name in below(branch, module) for line in permutes(module[name])]
    loops = [(line, permutes(module[re.search(r"body=%?([\w.\-]+)", line)[1]])) for lines in module.values() for line in lines
             if " while(" in line]
    (loop, exchanged), = [(line, found) for line, found in loops if found]
    return loop, exchanged, inside


def between(lines):
    """For each permute of a scheduled computation that is asynchronous, the instructions between its start and its done."""
    found = {}
    for number, line in enumerate(lines):
        start = re.match(r"\s*%?([\w.\-]+) = .* collective-permute-start\(", line)
        if start:
            done = next(i for i, other in enumerate(lines) if f"collective-permute-done(%{start[1]})" in other)
            found[start[1]] = lines[number + 1:done]
    return found
