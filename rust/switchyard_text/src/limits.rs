//! What keeps a hostile chat template from taking the machine: minijinja counts instructions (fuel), but one instruction
//! can double a string or walk a huge lazy list. So the template's source is rewritten before it is compiled: every `~`, `+`
//! and `*` and every filter passes its result through a function that checks its size and the time spent. The rewriting only inserts text into lines, so that errors keep their line numbers.

use std::cell::RefCell;

use minijinja::machinery::ast::{BinOpKind, Call, CallArg, Expr, Stmt};
use minijinja::machinery::{parse, WhitespaceConfig};
use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

use crate::python;

/// Longest string, in bytes, that an operation may produce.
pub const MAX_VALUE_BYTES: usize = 32 << 20;
/// Longest list that an operation may produce.
const MAX_ITEMS: usize = 1 << 20;
/// Longest rendered conversation.
pub const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Text that passes through operations and blocks in one rendering, in bytes: what stops 10^5 copies of a 32 MiB string.
const MAX_TRAFFIC_BYTES: usize = 4 << 30;
/// Instructions of one rendering. A thousand messages of the longest published templates need about two million.
pub const FUEL: u64 = 20_000_000;
/// Processor time of one rendering.
const MAX_CPU_MS: u64 = 1000;
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// A literal stretch of a template that is longer than this is charged each time it is printed.
const LONG_RAW_BYTES: usize = 256;

const BOUNDED: &str = "__sy_bounded";
const CONCAT: &str = "__sy_concat";
const RAW: &str = "__sy_raw";

#[derive(Default)]
struct Budget {
    start_ms: u64,
    ticks: u32,
    traffic: usize,
}

thread_local! {
    // A rendering has its own thread, so that the budget needs no key.
    static BUDGET: RefCell<Budget> = RefCell::new(Budget::default());
}

fn cpu_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is valid for writing; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Starts the budget of this thread's rendering.
pub fn begin() {
    BUDGET.with(|b| *b.borrow_mut() = Budget { start_ms: cpu_ms(), ..Budget::default() });
}

fn limit(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("chat template limit: {what}"))
}

/// Accounts for `bytes` of text made or scanned.
pub fn charge(bytes: usize) -> Result<(), Error> {
    BUDGET.with(|budget| {
        let mut budget = budget.borrow_mut();
        budget.traffic = budget.traffic.saturating_add(bytes);
        if budget.traffic > MAX_TRAFFIC_BYTES {
            return Err(limit(format!("more than {MAX_TRAFFIC_BYTES} bytes of intermediate text")));
        }
        budget.ticks = budget.ticks.wrapping_add(1);
        // Reading the clock is a system call, so small operations do it now and then.
        if (bytes >= 1 << 16 || budget.ticks % 64 == 0) && cpu_ms() - budget.start_ms > MAX_CPU_MS {
            return Err(limit(format!("more than {MAX_CPU_MS} ms of processor time")));
        }
        Ok(())
    })
}

pub fn check_bytes(bytes: usize) -> Result<(), Error> {
    if bytes > MAX_VALUE_BYTES {
        return Err(limit(format!("a string of more than {MAX_VALUE_BYTES} bytes")));
    }
    charge(bytes)
}

/// Fails if the value is too large to go on working with.
pub fn bounded(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => check_bytes(value.as_str().map_or(0, str::len))?,
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            let items = value.len().unwrap_or(0);
            if items > MAX_ITEMS {
                return Err(limit(format!("a list of more than {MAX_ITEMS} items")));
            }
            charge(items)?;
        }
        _ => charge(0)?,
    }
    Ok(value)
}

fn concat(left: Value, right: Value) -> Result<Value, Error> {
    // Python joins str() of both sides; minijinja's own operator would print lists its own way.
    let mut text = python::str_of(&left)?;
    text.push_str(&python::str_of(&right)?);
    bounded(Value::from(text))
}

pub fn register(env: &mut Environment<'static>) {
    env.add_function(BOUNDED, bounded);
    env.add_filter(BOUNDED, bounded);
    env.add_function(CONCAT, concat);
    env.add_function(RAW, |bytes: usize, _rest: Rest<Value>| charge(bytes).map(|()| Value::from("")));
}

/// The source with the checks inserted. Fails on a syntax error, which names the line.
pub fn instrument(source: &str) -> Result<String, Error> {
    if source.len() > MAX_TEMPLATE_BYTES {
        return Err(limit(format!("a template of more than {MAX_TEMPLATE_BYTES} bytes")));
    }
    let whitespace = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
    let tree = parse(source, "chat_template", Default::default(), whitespace)?;
    let mut walk = Walk { source, edits: Vec::new(), verbatim: source.contains("endraw"), error: None };
    walk.stmt(&tree);
    if let Some(error) = walk.error {
        return Err(error);
    }
    // Ends come before starts at the same place; among themselves they keep the order of the walk, which puts outer
    // starts and inner ends first.
    walk.edits.sort_by_key(|edit| (edit.at, edit.order));
    let mut out = String::with_capacity(source.len() * 2);
    let mut done = 0;
    for edit in &walk.edits {
        out.push_str(&source[done..edit.at]);
        out.push_str(&edit.text);
        done = edit.at + edit.replaced;
    }
    out.push_str(&source[done..]);
    Ok(out)
}

struct Edit {
    at: usize,
    order: u8,
    replaced: usize,
    text: String,
}

struct Walk<'s> {
    source: &'s str,
    edits: Vec<Edit>,
    verbatim: bool,
    error: Option<Error>,
}

impl Walk<'_> {
    fn insert(&mut self, at: u32, order: u8, replaced: usize, text: String) {
        self.edits.push(Edit { at: at as usize, order, replaced, text });
    }

    fn stmts(&mut self, body: &[Stmt]) {
        for stmt in body {
            self.stmt(stmt);
        }
    }

    fn stmt(&mut self, stmt: &Stmt) {
        match stmt {
            Stmt::Template(s) => self.stmts(&s.children),
            Stmt::EmitExpr(s) => self.expr(&s.expr),
            Stmt::EmitRaw(s) => self.raw(s.raw),
            Stmt::ForLoop(s) => {
                self.expr(&s.iter);
                s.filter_expr.iter().for_each(|e| self.expr(e));
                self.stmts(&s.body);
                self.stmts(&s.else_body);
            }
            Stmt::IfCond(s) => {
                self.expr(&s.expr);
                self.stmts(&s.true_body);
                self.stmts(&s.false_body);
            }
            Stmt::WithBlock(s) => {
                s.assignments.iter().for_each(|(_, e)| self.expr(e));
                self.stmts(&s.body);
            }
            Stmt::Set(s) => self.expr(&s.expr),
            Stmt::SetBlock(s) => {
                s.filter.iter().for_each(|e| self.expr(e));
                self.stmts(&s.body);
            }
            Stmt::AutoEscape(s) => self.stmts(&s.body),
            Stmt::FilterBlock(s) => {
                self.expr(&s.filter);
                self.stmts(&s.body);
            }
            Stmt::Block(s) => self.stmts(&s.body),
            Stmt::Macro(s) => {
                s.defaults.iter().for_each(|e| self.expr(e));
                self.stmts(&s.body);
            }
            Stmt::CallBlock(s) => {
                self.call(&s.call);
                self.stmts(&s.macro_decl.body);
            }
            Stmt::Do(s) => self.call(&s.call),
            // A chat template is one file.
            Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
                self.error.get_or_insert_with(|| {
                    Error::new(ErrorKind::InvalidOperation, "import, include and extends have nothing to load from")
                });
            }
            Stmt::Continue(_) | Stmt::Break(_) => {}
        }
    }

    fn call(&mut self, call: &Call) {
        self.expr(&call.expr);
        self.args(&call.args);
    }

    fn args(&mut self, args: &[CallArg]) {
        for arg in args {
            match arg {
                CallArg::Pos(e) | CallArg::Kwarg(_, e) | CallArg::PosSplat(e) | CallArg::KwargSplat(e) => self.expr(e),
            }
        }
    }

    fn expr(&mut self, expr: &Expr) {
        match expr {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(s) => {
                self.expr(&s.expr);
                [&s.start, &s.stop, &s.step].into_iter().flatten().for_each(|e| self.expr(e));
            }
            Expr::UnaryOp(s) => self.expr(&s.expr),
            Expr::BinOp(s) => {
                let span = s.span();
                // Comparisons make nothing, and the tree gives no start for them.
                let checked = matches!(s.op, BinOpKind::Add | BinOpKind::Mul | BinOpKind::Concat);
                let tilde = match s.op {
                    BinOpKind::Concat => self.tilde_after(s.left.span().end_offset),
                    _ => None,
                };
                if checked {
                    let name = if tilde.is_some() { CONCAT } else { BOUNDED };
                    self.insert(span.start_offset, 1, 0, format!("{name}("));
                }
                self.expr(&s.left);
                if let Some(at) = tilde {
                    self.insert(at, 1, 1, ",".to_string());
                }
                self.expr(&s.right);
                if checked {
                    self.insert(span.end_offset, 0, 0, ")".to_string());
                }
            }
            Expr::Compare(s) => {
                self.expr(&s.expr);
                s.ops.iter().for_each(|op| self.expr(&op.expr));
            }
            Expr::IfExpr(s) => {
                self.expr(&s.true_expr);
                self.expr(&s.test_expr);
                s.false_expr.iter().for_each(|e| self.expr(e));
            }
            Expr::Filter(s) => {
                s.expr.iter().for_each(|e| self.expr(e));
                self.args(&s.args);
                self.insert(s.span().end_offset, 0, 0, format!("|{BOUNDED}"));
            }
            Expr::Test(s) => {
                self.expr(&s.expr);
                self.args(&s.args);
            }
            Expr::GetAttr(s) => self.expr(&s.expr),
            Expr::GetItem(s) => {
                self.expr(&s.expr);
                self.expr(&s.subscript_expr);
            }
            Expr::Call(s) => self.call(s),
            Expr::List(s) => s.items.iter().for_each(|e| self.expr(e)),
            Expr::Map(s) => {
                s.keys.iter().for_each(|e| self.expr(e));
                s.values.iter().for_each(|e| self.expr(e));
            }
        }
    }

    /// Where the operator `~` is. Between it and the end of its left side there can only be spaces and the brackets that
    /// close around that side.
    fn tilde_after(&self, end: u32) -> Option<u32> {
        let rest = &self.source[end as usize..];
        let skipped = rest.find(|c: char| !c.is_whitespace() && c != ')')?;
        rest[skipped..].starts_with('~').then_some(end + skipped as u32)
    }

    /// Literal text is printed without passing the formatter, so a long one gets an expression of its own in the middle,
    /// between two visible characters, where no whitespace control reaches.
    fn raw(&mut self, raw: &str) {
        if raw.len() < LONG_RAW_BYTES {
            return;
        }
        let at = raw.as_ptr() as usize - self.source.as_ptr() as usize;
        let mut before: Option<char> = None;
        for (i, c) in raw.char_indices() {
            if before.is_some_and(|b| !b.is_whitespace() && !c.is_whitespace() && b != '{' && c != '{') && !self.verbatim {
                self.insert((at + i) as u32, 1, 0, format!("{{{{{RAW}({})}}}}", raw.len()));
                return;
            }
            before = Some(c);
        }
        if raw.len() > 4096 {
            self.error.get_or_insert_with(|| limit("literal text of more than 4096 bytes that cannot be accounted for".into()));
        }
    }
}
