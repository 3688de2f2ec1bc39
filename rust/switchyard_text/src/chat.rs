//! Chat templates, rendered by minijinja in an environment that stands for the one of transformers' apply_chat_template.

use std::borrow::Cow;
use std::ffi::CString;
use std::io;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde_json::{Map, Value as Json};

use crate::error::{corrupt, internal, invalid, Kind, Result, TextError};
use crate::limits;
use crate::python::{self, JsonStyle};

/// What transformers appends to the message that is to be continued, to find its end in the rendered text.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// The names of a message's reasoning; the first is the one that most templates read.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Stack of the thread that renders. Lists can be nested a million deep within the fuel, and freeing them recurses. The
/// memory is only reserved; a page is used when the stack reaches it.
const STACK_BYTES: usize = 512 << 20;

pub struct ChatTemplate {
    env: Environment<'static>,
    /// Names of the templates with their sources: "default", or the names of a list.
    sources: Vec<(String, String)>,
    special_tokens: Vec<(String, String)>,
}

/// Changes a string of a request; None leaves it as it is.
pub type Edit<'a> = &'a mut (dyn FnMut(&str) -> Option<String> + Send);

pub struct ChatRequest<'a> {
    pub messages: &'a str,
    pub tools: &'a str,
    pub kwargs: &'a str,
    pub add_generation_prompt: bool,
    pub continue_final_message: bool,
}

impl ChatTemplate {
    /// None if neither file has a template. chat_template.jinja wins over tokenizer_config.json.
    pub fn new(
        config: &Map<String, Json>,
        jinja: Option<&str>,
        special_tokens: Vec<(String, String)>,
    ) -> Result<Option<ChatTemplate>> {
        let (file, sources) = match (jinja, config.get("chat_template")) {
            (Some(text), _) => ("chat_template.jinja", vec![("default".to_string(), text.to_string())]),
            (None, Some(Json::String(text))) => ("tokenizer_config.json", vec![("default".to_string(), text.clone())]),
            (None, Some(Json::Array(list))) => {
                let named = list.iter().map(|entry| {
                    Some((entry.get("name")?.as_str()?.to_string(), entry.get("template")?.as_str()?.to_string()))
                });
                let named = named.collect::<Option<Vec<_>>>().ok_or_else(|| {
                    corrupt("tokenizer_config.json: an entry of chat_template lacks \"name\" or \"template\"")
                })?;
                ("tokenizer_config.json", named)
            }
            (None, Some(Json::Object(map))) => {
                let named = map.iter().filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_string())));
                ("tokenizer_config.json", named.collect())
            }
            _ => return Ok(None),
        };
        if sources.is_empty() {
            return Ok(None);
        }
        let mut env = environment();
        for (name, source) in &sources {
            // The compiler recurses over nested brackets, so it runs on the large stack as well.
            on_large_stack(|| {
                limits::instrument(&without_generation_tags(source))
                    .and_then(|text| env.add_template_owned(name.clone(), text))
            })?
            .map_err(|e| {
                let message = describe(&e);
                corrupt(format!("{file}: chat template \"{name}\": {message}"))
            })?;
        }
        Ok(Some(ChatTemplate { env, sources, special_tokens }))
    }

    /// The rendered text. `edit` sees every string that came with the request before the template does.
    pub fn render(&self, request: &ChatRequest, edit: Option<Edit>) -> Result<String> {
        on_large_stack(|| self.render_here(request, edit))?
    }

    fn render_here(
        &self,
        request: &ChatRequest,
        edit: Option<Edit>,
    ) -> Result<String> {
        if request.add_generation_prompt && request.continue_final_message {
            return Err(invalid("add_generation_prompt and continue_final_message exclude each other"));
        }
        let mut messages = parse_messages(request.messages)?;
        let mut tools = match parse(request.tools, "tools")? {
            None | Some(Json::Null) => Json::Null,
            Some(Json::Array(list)) => Json::Array(list),
            Some(_) => return Err(invalid("tools: expected a JSON array")),
        };
        let mut kwargs = match parse(request.kwargs, "template arguments")? {
            None | Some(Json::Null) => Map::new(),
            Some(Json::Object(map)) => map,
            Some(_) => return Err(invalid("template arguments: expected a JSON object")),
        };
        if let Some(edit) = edit {
            messages.iter_mut().for_each(|m| edit_strings(m, edit));
            edit_strings(&mut tools, edit);
            kwargs.values_mut().for_each(|v| edit_strings(v, edit));
        }

        let name = match &kwargs.remove("chat_template") {
            Some(Json::String(name)) => name.clone(),
            _ if !tools.is_null() && self.sources.iter().any(|(n, _)| n == "tool_use") => "tool_use".to_string(),
            _ => "default".to_string(),
        };
        let source = self.sources.iter().find(|(n, _)| *n == name).map(|(_, s)| s.as_str()).ok_or_else(|| {
            let known: Vec<&str> = self.sources.iter().map(|(n, _)| n.as_str()).collect();
            invalid(format!("there is no chat template \"{name}\"; this tokenizer has {}", known.join(", ")))
        })?;
        let continued = match request.continue_final_message {
            true => Some(tag_final_message(&mut messages, source)?),
            false => None,
        };

        let mut context: Map<String, Json> =
            self.special_tokens.iter().map(|(name, text)| (name.clone(), Json::String(text.clone()))).collect();
        context.insert("messages".into(), Json::Array(messages.into_iter().map(Json::Object).collect()));
        context.insert("tools".into(), tools);
        context.insert("documents".into(), Json::Null);
        context.insert("add_generation_prompt".into(), Json::Bool(request.add_generation_prompt));
        context.extend(kwargs);

        limits::begin();
        let template = self.env.get_template(&name).map_err(|e| internal(e.to_string()))?;
        let mut output = Output { bytes: Vec::new() };
        template.render_captured_to(Value::from_serialize(&context), &mut output).map(drop).map_err(chat_error)?;
        let rendered = String::from_utf8(output.bytes).map_err(|e| internal(e.to_string()))?;
        match continued {
            None => Ok(rendered),
            Some(message) => cut_at_tag(rendered, &message),
        }
    }
}

/// Rendering recurses as deep as the template's macros and values; the caller's stack may be small.
fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work)
            .map_err(|e| TextError { kind: Kind::ResourceExhausted, message: format!("chat template thread: {e}") })?;
        thread.join().map_err(|panic| {
            let words = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            // minijinja is compiled with checks for overflow (Cargo.toml), which panic.
            invalid(format!("chat template: an operation failed: {}", words.unwrap_or("unknown")))
        })
    })
}

struct Output {
    bytes: Vec<u8>,
}

impl io::Write for Output {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + text.len() > limits::MAX_OUTPUT_BYTES {
            return Err(io::Error::other(format!(
                "chat template limit: more than {} bytes of output",
                limits::MAX_OUTPUT_BYTES
            )));
        }
        self.bytes.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The innermost error's own words, with the line.
fn describe(error: &Error) -> String {
    let mut innermost = error;
    let mut cause: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(error);
    while let Some(inner) = cause {
        match inner.downcast_ref::<Error>() {
            Some(inner) => innermost = inner,
            None => return inner.to_string(),
        }
        cause = inner.source();
    }
    let words = innermost.detail().map_or_else(|| innermost.kind().to_string(), str::to_string);
    match innermost.line().or(error.line()) {
        Some(line) => format!("line {line}: {words}"),
        None => words,
    }
}

fn chat_error(error: Error) -> TextError {
    let mut message = describe(&error);
    if error.kind() == ErrorKind::OutOfFuel {
        message = format!("{message}: chat template limit: more than {} instructions", limits::FUEL);
    }
    let limited = error.kind() == ErrorKind::OutOfFuel || message.contains("chat template limit");
    let kind = if limited { Kind::ResourceExhausted } else { Kind::InvalidArgument };
    TextError { kind, message: format!("chat template: {message}") }
}

fn parse(text: &str, what: &str) -> Result<Option<Json>> {
    if text.trim().is_empty() {
        return Ok(None);
    }
    serde_json::from_str(text).map(Some).map_err(|e| invalid(format!("{what}: not JSON: {e}")))
}

/// The messages as transformers hands them to a template: without keys whose value is null, and with the reasoning under
/// both of its names.
fn parse_messages(text: &str) -> Result<Vec<Map<String, Json>>> {
    let Some(Json::Array(list)) = parse(text, "messages")? else {
        return Err(invalid("messages: expected a JSON array"));
    };
    list.into_iter()
        .enumerate()
        .map(|(i, message)| {
            let Json::Object(message) = message else {
                return Err(invalid(format!("messages[{i}]: expected a JSON object")));
            };
            let message: Map<String, Json> = message.into_iter().filter(|(_, v)| !v.is_null()).collect();
            let Some(reasoning) = REASONING_FIELDS.iter().find_map(|name| message.get(*name)).cloned() else {
                return Ok(message);
            };
            let mut both = Map::new();
            both.insert("thinking".into(), reasoning.clone());
            both.extend(message);
            both.insert("reasoning_content".into(), reasoning);
            Ok(both)
        })
        .collect()
}

trait Strings {
    fn edit(&mut self, edit: Edit);
}

fn edit_strings(value: &mut impl Strings, edit: Edit) {
    value.edit(edit);
}

impl Strings for Map<String, Json> {
    fn edit(&mut self, edit: Edit) {
        // Keys are printed too: the parameter names of a tool come from the user.
        *self = std::mem::take(self)
            .into_iter()
            .map(|(key, mut value)| {
                value.edit(edit);
                (edit(&key).unwrap_or(key), value)
            })
            .collect();
    }
}

impl Strings for Json {
    fn edit(&mut self, edit: Edit) {
        match self {
            Json::String(text) => {
                if let Some(edited) = edit(text) {
                    *text = edited;
                }
            }
            Json::Array(items) => items.iter_mut().for_each(|item| item.edit(edit)),
            Json::Object(map) => map.edit(edit),
            _ => {}
        }
    }
}

/// Appends the tag to the last message and returns the text to be continued.
fn tag_final_message(messages: &mut [Map<String, Json>], source: &str) -> Result<String> {
    let missing = || invalid("continue_final_message: the last message has no text content to continue");
    let last = messages.last_mut().ok_or_else(|| invalid("continue_final_message: there are no messages"))?;
    if !source.contains("content") {
        return Err(invalid("continue_final_message: the chat template does not print \"content\""));
    }
    let text = match last.get_mut("content") {
        Some(Json::String(text)) => text,
        Some(Json::Array(parts)) => {
            match parts.iter_mut().rev().find_map(|part| part.get_mut("text")) {
                Some(Json::String(text)) => text,
                _ => return Err(missing()),
            }
        }
        _ => return Err(missing()),
    };
    let message = text.clone();
    text.push_str(CONTINUE_TAG);
    Ok(message)
}

/// Everything before the tag. If the template trimmed the tag's own space, it trimmed the message's as well.
fn cut_at_tag(mut rendered: String, message: &str) -> Result<String> {
    let at = rendered.rfind(CONTINUE_TAG.trim_end()).filter(|_| rendered.contains(python::strip(message))).ok_or_else(|| {
        invalid("continue_final_message: the last message does not appear in the rendered conversation")
    })?;
    let keeps_spaces = rendered[at..].starts_with(CONTINUE_TAG);
    rendered.truncate(at);
    if !keeps_spaces {
        rendered.truncate(rendered.trim_end_matches(python::is_space).len());
    }
    Ok(rendered)
}

/// `{% generation %}` marks what the model wrote, for training. As a block that always runs it keeps its whitespace control
/// and the template's line numbers.
fn without_generation_tags(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let inside = &rest[open + 2..];
        let Some(close) = inside.find("%}") else { break };
        let body = &inside[..close];
        let word = body.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        out.push_str(&rest[..open + 2]);
        match word {
            "generation" => out.push_str(&body.replace("generation", "if true")),
            "endgeneration" => out.push_str(&body.replace("endgeneration", "endif")),
            _ => out.push_str(body),
        }
        out.push_str("%}");
        rest = &inside[close + 2..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_keep_trailing_newline(false);
    env.set_fuel(Some(limits::FUEL));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_formatter(|out, _state, value| {
        if let Some(text) = value.as_str() {
            limits::charge(text.len())?;
            return out.write_str(text).map_err(Error::from);
        }
        let text = python::str_of(value)?;
        limits::charge(text.len())?;
        out.write_str(&text).map_err(Error::from)
    });
    env.set_unknown_method_callback(methods);
    limits::register(&mut env);

    env.add_function("raise_exception", |message: Value| -> std::result::Result<Value, Error> {
        Err(fail(python::str_of(&message)?))
    });
    env.add_function("strftime_now", strftime_now);
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: Value| python::str_of(&value));
    env.add_filter("trim", |value: Value, chars: Option<String>| -> std::result::Result<String, Error> {
        let text = python::str_of(&value)?;
        Ok(match chars {
            None => python::strip(&text).to_string(),
            Some(chars) => text.trim_matches(|c| chars.contains(c)).to_string(),
        })
    });
    env.add_filter("join", join);
    env.add_filter("indent", indent);
    env.add_filter("replace", |value: Value, from: Value, to: Value, count: Option<i64>| {
        replace(&python::str_of(&value)?, &python::str_of(&from)?, &python::str_of(&to)?, count)
    });
    env.add_filter("format", |state: &State, text: Value, args: Rest<Value>| {
        check_format(text.as_str().unwrap_or_default(), &args)?;
        minijinja::filters::format(state, &text, args)
    });
    env.add_filter("batch", |state: &State, value: Value, count: usize, fill: Option<Value>| {
        check_count(count)?;
        minijinja::filters::batch(state, value, count, fill)
    });
    env.add_filter("slice", |state: &State, value: Value, count: usize, fill: Option<Value>| {
        check_count(count)?;
        minijinja::filters::slice(state, value, count, fill)
    });
    // jinja2 turns what is not a number into the default.
    env.add_filter("int", |state: &State, value: Value, default: Option<Value>| {
        let text = value.as_str().map(|s| Value::from(python::strip(s)));
        minijinja::filters::int(state, text.as_ref().unwrap_or(&value)).unwrap_or_else(|_| default.unwrap_or(Value::from(0)))
    });
    env.add_filter("float", |state: &State, value: Value, default: Option<Value>| {
        let text = value.as_str().map(|s| Value::from(python::strip(s)));
        minijinja::filters::float(state, text.as_ref().unwrap_or(&value))
            .unwrap_or_else(|_| default.unwrap_or(Value::from(0.0)))
    });
    env.add_test("iterable", |value: Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
            || value.is_undefined()
    });
    // Python's Sequence-like test of jinja2: anything with a length and items, strings and dicts included.
    env.add_test("sequence", |value: Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map) || value.is_undefined()
    });
    env
}

fn fail(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn check_count(count: usize) -> std::result::Result<(), Error> {
    if count > 1 << 20 {
        return Err(fail("chat template limit: a count of more than 2^20"));
    }
    Ok(())
}

/// A width in a format string pads, so it is bounded before anything is padded.
fn check_format(text: &str, args: &[Value]) -> std::result::Result<(), Error> {
    let long_number = text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > 6);
    let long_arg = text.contains(['*', '{']) && args.iter().any(|a| a.is_integer() && a.to_string().len() > 6);
    if long_number || (long_arg && text.contains('*')) {
        return Err(fail("chat template limit: a format width of more than six digits"));
    }
    let fields = text.matches(['%', '{']).count();
    let widest = text.split(|c: char| !c.is_ascii_digit()).filter_map(|d| d.parse::<usize>().ok()).max().unwrap_or(0);
    limits::check_bytes(fields.saturating_mul(widest))
}

/// SOURCE_DATE_EPOCH, the convention of reproducible builds: seconds that stand for "now", read as UTC.
fn fixed_time() -> Option<libc::time_t> {
    std::env::var("SOURCE_DATE_EPOCH").ok()?.trim().parse().ok()
}

fn strftime_now(format: String) -> std::result::Result<String, Error> {
    let format = CString::new(format).map_err(|_| fail("strftime_now: the format contains a zero byte"))?;
    let mut buffer = vec![0u8; 4096];
    // SAFETY: localtime_r and gmtime_r fill `local` from a valid time; strftime writes at most buffer.len() bytes and
    // returns how many.
    let size = unsafe {
        let mut local: libc::tm = std::mem::zeroed();
        let filled = match fixed_time() {
            Some(fixed) => libc::gmtime_r(&fixed, &mut local),
            None => libc::localtime_r(&libc::time(std::ptr::null_mut()), &mut local),
        };
        if filled.is_null() {
            return Err(fail("strftime_now: the local time is not known"));
        }
        libc::strftime(buffer.as_mut_ptr().cast(), buffer.len(), format.as_ptr(), &local)
    };
    buffer.truncate(size);
    String::from_utf8(buffer).map_err(|_| fail("strftime_now: the result is not UTF-8"))
}

/// transformers' filter: json.dumps with ensure_ascii off, its options in this order (sort_keys by name only).
fn tojson(
    value: Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    kwargs: Kwargs,
) -> std::result::Result<String, Error> {
    let option = |given: Option<Value>, name: &str| -> std::result::Result<Option<Value>, Error> {
        let named: Option<Value> = kwargs.get(name)?;
        Ok(given.or(named).filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let ensure_ascii = option(ensure_ascii, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let sort_keys = option(None, "sort_keys")?.is_some_and(|v| v.is_true());
    let indent = match option(indent, "indent")? {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_string),
        Some(width) => {
            let width = i64::try_from(width).map_err(|_| fail("tojson: indent is neither a number nor a string"))?;
            Some(" ".repeat(width.clamp(0, 1000) as usize))
        }
    };
    let item = if indent.is_some() { "," } else { ", " };
    let (item_separator, key_separator) = match option(separators, "separators")? {
        None => (item.to_string(), ": ".to_string()),
        Some(pair) => {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            match pair.as_slice() {
                [item, key] => (python::str_of(item)?, python::str_of(key)?),
                _ => return Err(fail("tojson: separators needs two strings")),
            }
        }
    };
    kwargs.assert_all_used()?;
    python::json(&value, &JsonStyle { ensure_ascii, indent, item_separator, key_separator, sort_keys })
}

fn join(value: Value, separator: Option<Value>, attribute: Option<Value>, kwargs: Kwargs) -> std::result::Result<String, Error> {
    let separator = match separator.or(kwargs.get::<Option<Value>>("d")?) {
        None => String::new(),
        Some(separator) => python::str_of(&separator)?,
    };
    let attribute = attribute.or(kwargs.get::<Option<Value>>("attribute")?);
    kwargs.assert_all_used()?;
    join_values(value, &separator, attribute.as_ref())
}

fn join_values(value: Value, separator: &str, attribute: Option<&Value>) -> std::result::Result<String, Error> {
    let mut out = String::new();
    for (i, item) in value.try_iter()?.enumerate() {
        if i > 0 {
            out.push_str(separator);
        }
        let item = match attribute {
            None => item,
            Some(name) => item.get_item(name)?,
        };
        out.push_str(&python::str_of(&item)?);
        if out.len() > limits::MAX_VALUE_BYTES {
            break;
        }
    }
    limits::check_bytes(out.len())?;
    Ok(out)
}

fn indent(
    value: Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    kwargs: Kwargs,
) -> std::result::Result<String, Error> {
    let text = python::str_of(&value)?;
    let first = first.or(kwargs.get::<Option<bool>>("first")?).unwrap_or(false);
    let blank = blank.or(kwargs.get::<Option<bool>>("blank")?).unwrap_or(false);
    let pad = match width.or(kwargs.get::<Option<Value>>("width")?) {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_string(),
            None => " ".repeat(usize::try_from(width)?.min(limits::MAX_VALUE_BYTES)),
        },
    };
    kwargs.assert_all_used()?;
    let lines = text.matches('\n').count() + 1;
    limits::check_bytes(lines.saturating_mul(pad.len()).saturating_add(text.len()))?;
    let mut out = String::new();
    for (i, line) in text.split('\n').enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&pad);
        }
        out.push_str(line);
    }
    Ok(out)
}

fn replace(text: &str, from: &str, to: &str, count: Option<i64>) -> std::result::Result<String, Error> {
    let matches = if from.is_empty() { text.chars().count() + 1 } else { text.matches(from).count() };
    let matches = match count {
        Some(count) if count >= 0 => matches.min(count as usize),
        _ => matches,
    };
    limits::check_bytes(matches.saturating_mul(to.len()).saturating_add(text.len()))?;
    Ok(text.replacen(from, to, matches))
}

/// Python's methods: minijinja-contrib's, and here those that it lacks or answers otherwise.
fn methods(state: &State, value: &Value, method: &str, args: &[Value]) -> std::result::Result<Value, Error> {
    use minijinja::value::from_args;
    if let Some(text) = value.as_str() {
        limits::charge(text.len())?;
        match method {
            "strip" | "lstrip" | "rstrip" => {
                let (chars,): (Option<&str>,) = from_args(args)?;
                let cut = |c: char| chars.map_or_else(|| python::is_space(c), |chars| chars.contains(c));
                return Ok(Value::from(match method {
                    "strip" => text.trim_matches(cut),
                    "lstrip" => text.trim_start_matches(cut),
                    _ => text.trim_end_matches(cut),
                }));
            }
            "replace" => {
                let (from, to, count): (&str, &str, Option<i64>) = from_args(args)?;
                return replace(text, from, to, count).map(Value::from);
            }
            "join" => {
                let (values,): (Value,) = from_args(args)?;
                return join_values(values, text, None).map(Value::from);
            }
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)));
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)));
            }
            // Python counts characters, contrib's version bytes.
            "find" | "rfind" | "index" | "rindex" => {
                let (what,): (&str,) = from_args(args)?;
                let at = if method.starts_with('r') { text.rfind(what) } else { text.find(what) };
                return match at {
                    Some(at) => Ok(Value::from(text[..at].chars().count())),
                    None if method.ends_with("find") => Ok(Value::from(-1)),
                    None => Err(fail("substring not found")),
                };
            }
            "partition" | "rpartition" => {
                let (separator,): (&str,) = from_args(args)?;
                let parts = if method == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
                let parts = match parts {
                    Some((before, after)) => [before, separator, after],
                    None if method == "partition" => [text, "", ""],
                    None => ["", "", text],
                };
                return Ok(parts.into_iter().map(Value::from).collect());
            }
            "rsplit" => {
                let (separator, count): (Option<&str>, Option<i64>) = from_args(args)?;
                if let Some(separator) = separator {
                    let pieces = count.filter(|c| *c >= 0).map_or(usize::MAX, |c| c as usize + 1);
                    let mut parts: Vec<&str> = text.rsplitn(pieces, separator).collect();
                    parts.reverse();
                    return Ok(parts.into_iter().map(Value::from).collect());
                }
            }
            "casefold" => return Ok(Value::from(text.to_lowercase())),
            "format" => check_format(text, args)?,
            // Of an empty string these are false in Python.
            "isspace" | "isdigit" | "isnumeric" | "isalnum" | "isalpha" | "islower" | "isupper" if text.is_empty() => {
                return Ok(Value::from(false));
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}
