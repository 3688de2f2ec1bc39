//! How Python would print a value: str(), repr() and json.dumps(), which is what templates written for jinja2 rely on.
//! Every printer stops at a byte limit and at a nesting depth, because a template can build a value whose text is
//! exponentially longer than itself (a list that holds the same list twice, forty times over).

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use crate::limits::MAX_VALUE_BYTES;

const MAX_DEPTH: usize = 200;

/// str.isspace() of one character: Unicode white space plus the four ASCII separators that Rust leaves out.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

pub fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

fn too_large() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value's text exceeds {MAX_VALUE_BYTES} bytes"))
}

fn check(out: &str, depth: usize) -> Result<(), Error> {
    if out.len() > MAX_VALUE_BYTES {
        return Err(too_large());
    }
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deeply to be printed"));
    }
    Ok(())
}

/// str(value). Undefined prints as nothing, as jinja2's default Undefined does.
pub fn str_of(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => out.push_str(value.as_str().unwrap_or_default()),
        _ => repr(&mut out, value, 0)?,
    }
    Ok(out)
}

fn repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    check(out, depth)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => repr_str(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                repr(out, &item, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                repr(out, &key, depth + 1)?;
                out.push_str(": ");
                repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        ValueKind::Invalid => {
            // The error that the value carries, rather than its text in the middle of a prompt.
            return Err(Error::new(ErrorKind::InvalidOperation, value.to_string()));
        }
        _ => out.push_str(&value.to_string()),
    }
    check(out, depth)
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(x) => float(x, "inf", "nan"),
        Err(_) => value.to_string(),
    }
}

/// repr() of a float: the shortest digits that read back, with an exponent outside 1e-4 .. 1e16.
fn float(x: f64, infinity: &str, nan: &str) -> String {
    if x.is_nan() {
        return nan.to_string();
    }
    if x.is_infinite() {
        return format!("{}{infinity}", if x < 0.0 { "-" } else { "" });
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x != 0.0 && !(-4..16).contains(&exponent) {
        return format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs());
    }
    let plain = format!("{x}");
    if plain.contains('.') {
        plain
    } else {
        plain + ".0"
    }
}

/// str.isprintable() of one character. Rust's debug escapes follow the same Unicode categories; the leading letter keeps
/// combining marks, which are printable, from being escaped for another reason.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    let mut pair = String::from("a");
    pair.push(c);
    pair.escape_debug().count() == 2
}

fn repr_str(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if is_printable(c) => out.push(c),
            c => match c as u32 {
                n @ 0..=0xff => out.push_str(&format!("\\x{n:02x}")),
                n @ 0x100..=0xffff => out.push_str(&format!("\\u{n:04x}")),
                n => out.push_str(&format!("\\U{n:08x}")),
            },
        }
    }
    out.push(quote);
}

/// The options of json.dumps that a chat template may set.
pub struct JsonStyle {
    pub ensure_ascii: bool,
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    pub sort_keys: bool,
}

pub fn json(value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let mut out = String::new();
    json_value(&mut out, value, style, 0)?;
    Ok(out)
}

fn line_break(out: &mut String, style: &JsonStyle, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
}

fn json_value(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    check(out, depth)?;
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&json_number(value)),
        ValueKind::String => json_str(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let mut empty = true;
            out.push('[');
            for item in value.try_iter()? {
                if !empty {
                    out.push_str(&style.item_separator);
                }
                empty = false;
                line_break(out, style, depth + 1);
                json_value(out, &item, style, depth + 1)?;
            }
            if !empty {
                line_break(out, style, depth);
            }
            out.push(']');
        }
        ValueKind::Map => {
            let mut keys = value.try_iter()?.collect::<Vec<_>>();
            if style.sort_keys {
                keys.sort();
            }
            out.push('{');
            for (i, key) in keys.iter().enumerate() {
                if i > 0 {
                    out.push_str(&style.item_separator);
                }
                line_break(out, style, depth + 1);
                let name = match key.kind() {
                    ValueKind::String => key.as_str().unwrap_or_default().to_string(),
                    ValueKind::None => "null".to_string(),
                    ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_string(),
                    ValueKind::Number => json_number(key),
                    kind => return Err(not_json(kind, "a key")),
                };
                json_str(out, &name, style.ensure_ascii);
                out.push_str(&style.key_separator);
                json_value(out, &value.get_item(key)?, style, depth + 1)?;
            }
            if !keys.is_empty() {
                line_break(out, style, depth);
            }
            out.push('}');
        }
        kind => return Err(not_json(kind, "a value")),
    }
    check(out, depth)
}

fn not_json(kind: ValueKind, what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {what} of type {kind} is not JSON serializable"))
}

fn json_number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(x) => float(x, "Infinity", "NaN"),
        Err(_) => value.to_string(),
    }
}

fn json_str(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\x08' => out.push_str("\\b"),
            '\x0c' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && (c as u32) >= 0x7f && c != '\x7f') => {
                let mut units = [0u16; 2];
                for unit in c.encode_utf16(&mut units) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
