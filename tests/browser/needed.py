"""Which cells of a notebook must run before some of them can: a browser is slow, and nbval runs every cell anyway.

A cell needs, for each name that it reads and has not bound itself, the last cell above it that binds the name, and those in
between that change what it is bound to; each of these needs others in turn.

    needed(targets) = targets + needed(binders and changers of every name that targets read)

Reference: the Python language reference, "Naming and binding"; the module symtable.
"""

import ast
import symtable

__all__ = ["needed_cells"]


def needed_cells(sources: list[str], targets: list[int]) -> list[int]:
    """The places of the cells to run, in order. sources: the text of each cell ("" for prose); targets: places in it."""
    cells = [_Cell(source) for source in sources]
    needed, todo = set(), list(targets)
    while todo:
        at = todo.pop()
        if at not in needed:
            needed.add(at)
            todo += [k for name in cells[at].reads for k in _makers(cells, at, name)]
    return sorted(needed)


def _makers(cells, at, name):
    """The last binder of `name` above cell `at` and its changers since; none above: the first one below (a function's body)."""
    above = [k for k in range(at) if name in cells[k].binds]
    if not above:
        return [k for k in range(at + 1, len(cells)) if name in cells[k].binds][:1]
    if name in cells[above[-1]].imports:
        return above[-1:]
    return [above[-1], *(k for k in range(above[-1] + 1, at) if name in cells[k].changes)]


class _Cell:
    """The global names that a cell reads before it binds them, binds, imports, changes (calls a method of, sets a part of)."""

    def __init__(self, source: str):
        text = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
        self.reads, self.binds, self.imports, self.changes = set(), set(), set(), set()
        tree = ast.parse(text)
        self._walk(tree.body)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                self._part(node.func)
            elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
                self._part(node)
            elif isinstance(node, ast.AugAssign):
                self._part(node.target)
        self.changes &= self.reads | self.binds  # not a function's own names

    def _walk(self, statements):
        for statement in statements:
            self._one(statement)

    def _one(self, statement):
        """Statements with a body are taken apart, so that what is bound in one line counts as bound in the next."""
        if isinstance(statement, (ast.For, ast.While, ast.If, ast.With)):
            items = getattr(statement, "items", ())
            heads = [getattr(statement, part, None) for part in ("iter", "test")] + [item.context_expr for item in items]
            bound = [getattr(statement, "target", None)] + [item.optional_vars for item in items]
            for line in [ast.unparse(head) for head in heads if head] + [f"{ast.unparse(name)} = None" for name in bound if name]:
                self._text(line)
            self._walk([*statement.body, *getattr(statement, "orelse", ())])
        else:
            if isinstance(statement, ast.AugAssign):
                self._text(ast.unparse(statement.target))  # it is read first
            self._text(ast.unparse(statement))

    def _text(self, text):
        read, bound = set(), set()
        self._scope(symtable.symtable(text, "cell", "exec"), True, read, bound)
        self.reads |= read - self.binds
        self.binds |= bound

    def _scope(self, table, top, read, bound):
        for symbol in table.get_symbols():
            name = symbol.get_name()
            if (top or symbol.is_global()) and symbol.is_referenced():
                read.add(name)
            if (top or symbol.is_declared_global()) and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(name)
                if symbol.is_imported():
                    self.imports.add(name)
        for child in table.get_children():
            self._scope(child, False, read, bound)

    def _part(self, node):
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        if isinstance(node, ast.Name):
            self.changes.add(node.id)
