#!/usr/bin/env python3
"""tools/check_docs.py [ROOT]

What CONTRIBUTING.md asks of comments, as far as a script can see it:
  every header   starts with a comment that says what it is for, and has #pragma once;
  every public   type and function (include/) has a comment above it, or above the lines that it stands together
                 with, or its class's comment names it. Needs none: an accessor named like a field, a body that shows
                 everything, constructors, operators;
  Shapes:        in the comment of a public function that takes rows or a tensor;
  Errors:        in the comment of a public function whose definition throws.
"""
import os
import re
import sys

import sources

VIEWS = re.compile(r"\b(Rows|ConstRows|RowsView|TensorView)\b")


def blank_strings_and_macros(text):
    """Comment-free code without the contents of literals and without preprocessor lines; lines keep their numbers."""
    text = sources.strip_comments(text)
    text = re.sub(r"'(?:\\.|[^'\\\n])'", "' '", text)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', lambda match: '"' + " " * (len(match.group(0)) - 2) + '"', text)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda match: re.sub(r"[^\n]", " ", match.group(0)), text,
                  flags=re.M)


def without_template(text):
    """A declaration without its template<...> and requires(...) in front, and without [[attributes]]."""
    text = re.sub(r"\[\[.*?\]\]", "", text, flags=re.S).strip()
    while True:
        match = re.match(r"(template\s*<|requires\s*\(|alignas\s*\()", text)
        if not match:
            return text
        opening, closing = ("<", ">") if match.group(0).endswith("<") else ("(", ")")
        depth, at = 0, match.end() - 1
        while at < len(text):
            depth += {opening: 1, closing: -1}.get(text[at], 0)
            at += 1
            if depth == 0:
                break
        rest = text[at:].strip()
        # requires std::is_same_v<...> has no parentheses: it ends with its line.
        text = re.sub(r"^requires\s+[^(\n][^\n]*\n", "", rest + "\n").strip()


class Declaration:
    def __init__(self, kind, name, scope, first, last, text, has_body):
        self.kind, self.name = kind, name    # "type", "function" or "other"
        self.scope = scope                   # names of the classes around
        self.first, self.last = first, last  # lines, counted from 0
        self.text, self.has_body = text, has_body
        self.comment = ""                    # its own, or that of the group it stands in
        self.class_comment = ""              # that of the class around it

    @property
    def qualified(self):
        return "::".join(self.scope + [self.name])


def public_declarations(text):
    """The public declarations at namespace and class scope."""
    code = blank_strings_and_macros(text)
    line_of = lambda position: code.count("\n", 0, position)
    found = []
    scopes = []  # (kind "namespace" or class name, access)
    position, start = 0, None

    def matching_brace(opening):
        depth = 0
        for at in range(opening, len(code)):
            depth += {"{": 1, "}": -1}.get(code[at], 0)
            if depth == 0:
                return at
        return len(code) - 1

    def is_public():
        return all(access == "public" for _, access in scopes)

    def add(kind, name, end, has_body):
        if is_public():
            found.append(Declaration(kind, name, [scope for scope, _ in scopes if scope != "namespace"], line_of(start),
                                     line_of(end), " ".join(code[start:end].split()), has_body))

    def function_name(statement):
        match = re.search(r"(operator\s*(?:\(\)|[^(]*)|~?\w+)\s*\(", statement)
        return match.group(1) if match else ""

    while position < len(code):
        char = code[position]
        if start is None:
            if char.isspace() or char == ";":
                position += 1
                continue
            if char == "}":
                if scopes:
                    scopes.pop()
                position += 1
                continue
            label = re.compile(r"(public|protected|private)\s*:").match(code, position)
            if label:
                scopes[-1] = (scopes[-1][0], label.group(1))
                position = label.end()
                continue
            start = position
        if char == "{":
            statement = without_template(code[start:position])
            type_match = re.match(r"(class|struct|union)\b[^=]*?(\w+)(?:\s+final)?\s*(?::[^:].*)?$", statement, re.S)
            if re.match(r"(inline\s+)?namespace\b|extern\s*\"", statement):
                # What a file keeps to itself is nobody's interface.
                hidden = re.match(r"namespace\s*$", statement)
                scopes.append(("namespace", "private" if hidden else "public"))
                start = None
            elif type_match and "(" not in statement.split(":")[0]:
                add("type", type_match.group(2), position, True)
                scopes.append((type_match.group(2), "private" if type_match.group(1) == "class" else "public"))
                start = None
            else:
                end = matching_brace(position)
                after = code[end + 1:end + 200].lstrip()[:1]
                if re.match(r"enum\b", statement):
                    name = re.match(r"enum\s+(?:class\s+|struct\s+)?(\w*)", statement).group(1)
                    add("type", name, end, True)
                    start = None
                elif "(" in statement and not re.search(r"=\s*$", statement) and after not in (",", "{", ";"):
                    add("function", function_name(statement), end, True)
                    start = None
                position = end
        elif char == ";":
            statement = without_template(code[start:position])
            if re.match(r"(using|typedef|friend|static_assert)\b", statement):
                add("other", "", position, False)
            elif re.match(r"(class|struct|union|enum)\b[^(=]*$", statement):
                pass  # declared here, defined elsewhere
            elif re.search(r"\(\s*\*", statement):
                add("other", "", position, False)  # a pointer to a function
            elif re.search(r"[\w>\])]\s*\(|operator", statement.split("=")[0]):
                add("function", function_name(statement), position, False)
            else:
                add("other", "", position, False)
            start = None
        position += 1

    attach_comments(found, text.split("\n"))
    return found


def attach_comments(declarations, lines):
    """A declaration's comment stands above it, behind it, or above the declarations that it follows without a gap."""
    previous = None
    types = {}
    for declaration in declarations:
        above = declaration.first - 1
        comment = []
        while above >= 0 and lines[above].lstrip().startswith("//"):
            comment.insert(0, lines[above].strip())
            above -= 1
        if "//" in lines[declaration.last]:
            comment.append(lines[declaration.last].split("//", 1)[1])
        declaration.comment = "\n".join(comment)
        if not comment and previous and previous.scope == declaration.scope and previous.last == declaration.first - 1:
            declaration.comment = previous.comment
        if declaration.kind == "type":
            types[declaration.qualified] = declaration.comment
        declaration.class_comment = types.get("::".join(declaration.scope), "")
        previous = declaration


def needs_comment(declaration):
    if declaration.kind == "type":
        return True
    if declaration.kind != "function" or declaration.has_body:
        return False
    text, name = declaration.text, declaration.name
    if re.search(rf"\b{re.escape(name)}\b", declaration.class_comment):
        return False  # the class says it
    if re.search(r"=\s*(default|delete)$|\boverride\b", text) or name.startswith(("~", "operator")):
        return False
    is_constructor = declaration.scope and name == declaration.scope[-1]
    is_accessor = declaration.scope and re.fullmatch(r"[a-z][a-z0-9_]*", name)
    return not is_constructor and not is_accessor


def throwing_functions(text):
    """Names (Class::Function or Function) of the functions that throw, themselves or by a [[noreturn]] one."""
    code = sources.strip_comments(text)
    helpers = re.findall(r"\[\[noreturn\]\][^;{]*?(\w+)\s*\(", code)
    throws = re.compile(r"\bthrow Error\b" + "".join(rf"|\b{name}\(" for name in helpers))
    # A definition starts in the first column (the formatter sees to that) and ends with a brace there.
    names = set()
    definition = re.compile(r"^(?!namespace|struct|class|enum|template)(\w[^;{}]*?)\{\n(.*?)^\}", re.M | re.S)
    for match in definition.finditer(code):
        head = re.search(r"([\w:~]+)\s*\(", match.group(1))
        if head and throws.search(match.group(2)):
            names.add(head.group(1))
    return names


def check(root):
    """(messages, number of public declarations, number of headers)"""
    tree = sources.Tree(root)
    messages = []
    declarations = headers = 0
    throwing = {}  # top folder of src -> names
    for path in tree.files:
        if path.startswith("src/") and path.endswith(".cc"):
            throwing.setdefault(path.split("/")[1], set()).update(throwing_functions(tree.text(path)))
    for path in tree.files:
        if not path.endswith(".h") or path.endswith("-inl.h"):
            continue
        headers += 1
        text = tree.text(path)
        if not text.startswith("//"):
            messages.append(f"{path}:1: the first line should be a comment that says what the header is for")
        if "#pragma once" not in text:
            messages.append(f"{path}:1: #pragma once is missing")
        if not path.startswith("include/"):
            continue
        throws = throwing.get(path.split("/")[2], ())
        found = public_declarations(text)
        comments = {}  # of all overloads together: one that throws is enough to explain
        for declaration in found:
            comments[declaration.qualified] = comments.get(declaration.qualified, "") + "\n" + declaration.comment
        for declaration in found:
            where = f"{path}:{declaration.first + 1}: {declaration.qualified}"
            declarations += declaration.kind != "other"
            if needs_comment(declaration) and not declaration.comment:
                messages.append(f"{where}: a public {declaration.kind} needs a comment")
            if declaration.kind != "function":
                continue
            comment = comments[declaration.qualified] + "\n" + declaration.class_comment
            parameters = declaration.text.split("(", 1)[-1]
            is_constructor = declaration.scope and declaration.name == declaration.scope[-1]
            takes_view = VIEWS.search(parameters) and not declaration.has_body and not is_constructor
            if takes_view and "Shapes:" not in comment:
                messages.append(f"{where}: takes rows or a tensor, so its comment needs \"Shapes:\"")
            throws_here = declaration.qualified in throws and "= default" not in declaration.text
            if throws_here and not re.search(r"\bErrors\b|\b[Tt]hrows\b", comment):
                messages.append(f"{where}: throws, so its comment needs \"Errors:\"")
    return messages, declarations, headers


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else sources.ROOT
    messages, declarations, headers = check(root)
    for message in messages:
        print(message)
    print(f"{headers} headers, {declarations} public declarations, {len(messages)} problems")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
