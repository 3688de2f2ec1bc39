//! Chat ids in which no control token comes from a request's strings.
//!
//! Every string of the request gets the noncharacter U+FDD0 after the first character of each special token's text in it,
//! and of each beginning of one at its end, which the next string could complete. The special tokens that stand whole in the
//! rendered text are then the template's own. They are swapped for sentinels, the marks are taken out, and a tokenizer for
//! which special tokens are ordinary text and sentinels are added tokens encodes it all in one go, so that the result is
//! what the ordinary path gives for a conversation without such text.

use std::collections::HashMap;

use crate::chat::ChatRequest;
use crate::error::{invalid, Result};
use crate::text_tokenizer::{TextTokenizer, SENTINELS};

const MARK: char = '\u{fdd0}';

/// Noncharacters are not for interchange, so a request's own are dropped.
fn is_reserved(c: char) -> bool {
    ('\u{fdd0}'..='\u{fdd5}').contains(&c)
}

pub struct Marker<'a> {
    mark: char,
    by_first: HashMap<char, Vec<&'a str>>,
    pub inserted: bool,
}

impl<'a> Marker<'a> {
    pub fn new(specials: &'a [(String, u32)], mark: char) -> Marker<'a> {
        let mut by_first: HashMap<char, Vec<&str>> = HashMap::new();
        for (text, _) in specials {
            if let Some(first) = text.chars().next() {
                by_first.entry(first).or_default().push(text);
            }
        }
        Marker { mark, by_first, inserted: false }
    }

    /// The marked text, or None if there is nothing to change.
    pub fn mark(&mut self, text: &str) -> Option<String> {
        let mut out: Option<String> = None;
        let mut done = 0;
        for (i, c) in text.char_indices() {
            let Some(specials) = self.by_first.get(&c) else { continue };
            let rest = &text[i..];
            if specials.iter().any(|s| rest.starts_with(s) || s.starts_with(rest)) {
                let end = i + c.len_utf8();
                let out = out.get_or_insert_with(String::new);
                out.push_str(&text[done..end]);
                out.push(self.mark);
                done = end;
            }
        }
        if let Some(out) = &mut out {
            self.inserted = true;
            out.push_str(&text[done..]);
        }
        out
    }
}

pub fn chat_ids(tokenizer: &TextTokenizer, request: &ChatRequest, safe: bool) -> Result<Vec<u32>> {
    let chat = tokenizer.chat.as_ref().ok_or_else(|| invalid("this tokenizer has no chat template"))?;
    if !safe {
        return tokenizer.encode(&chat.render(request, None)?, false, true);
    }
    let mut marker = Marker::new(&tokenizer.special_texts, MARK);
    let mut edit = |text: &str| {
        if !text.contains(is_reserved) {
            return marker.mark(text);
        }
        let clean: String = text.chars().filter(|c| !is_reserved(*c)).collect();
        Some(marker.mark(&clean).unwrap_or(clean))
    };
    let rendered = chat.render(request, Some(&mut edit))?;
    if !marker.inserted {
        return tokenizer.encode(&rendered, false, true);
    }

    // Longest first at each place, as the added vocabulary matches.
    let mut by_first: HashMap<char, Vec<&(String, u32)>> = HashMap::new();
    for special in &tokenizer.special_texts {
        if let Some(first) = special.0.chars().next() {
            by_first.entry(first).or_default().push(special);
        }
    }
    let mut text = String::with_capacity(rendered.len());
    let mut control = Vec::new();
    let mut at = 0;
    while let Some(c) = rendered[at..].chars().next() {
        let found = by_first.get(&c).and_then(|s| s.iter().find(|(special, _)| rendered[at..].starts_with(special.as_str())));
        if let Some((special, id)) = found {
            text.push(SENTINELS[tokenizer.sentinel_of(*id)]);
            control.push(*id);
            at += special.len();
        } else {
            if !is_reserved(c) {
                text.push(c);
            }
            at += c.len_utf8();
        }
    }
    tokenizer.encode_with_sentinels(&text, &control)
}
