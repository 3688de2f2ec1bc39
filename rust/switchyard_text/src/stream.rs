//! Ids one by one into text that is final. The concatenation of everything returned equals decoding all ids at once.
//!
//! Tokens that decode to nothing (unknown ids, skipped special tokens) never enter the window, because the decoders do not
//! see them either. Then there are three cases:
//! - Byte-level decoders: the text is the lossy UTF-8 reading of all bytes, so only an unfinished sequence (at most three
//!   bytes) is held back.
//! - Byte fallback: a run of <0xNN> tokens is read as a whole, and one bad byte spoils all of it, so a run is held back until
//!   another token ends it.
//! - The rest: a token is final at once; some decoders treat the first token differently (the leading space), so the last
//!   tokens are kept as context and decoded again with the new ones.

use std::sync::Arc;

use crate::error::Result;
use crate::text_tokenizer::{clean_up, Decoding, TextTokenizer};

pub struct Stream {
    tokenizer: Arc<TextTokenizer>,
    skip_special: bool,
    /// Byte-level: bytes that are not yet characters.
    bytes: Vec<u8>,
    /// The others: `context` ids whose text is out already, then ids that wait.
    ids: Vec<u32>,
    context: usize,
    /// Whether `context` is still everything there was.
    from_start: bool,
    /// Text that the cleaning of spaces may still change.
    uncleaned: String,
}

/// The byte that a character stands for in byte-level vocabularies: printable Latin-1 stands for itself, the other bytes
/// follow in order from U+0100.
fn byte_of(c: char) -> Option<u8> {
    let itself = |b: u32| (0x21..=0x7e).contains(&b) || (0xa1..=0xac).contains(&b) || (0xae..=0xff).contains(&b);
    let code = c as u32;
    if code < 0x100 {
        return itself(code).then_some(code as u8);
    }
    (0..0x100).filter(|b| !itself(*b)).nth((code - 0x100) as usize).map(|b| b as u8)
}

fn is_byte_token(token: &str) -> bool {
    token.len() == 6 && token.starts_with("<0x") && token.ends_with('>') && u8::from_str_radix(&token[3..5], 16).is_ok()
}

impl Stream {
    pub fn new(tokenizer: Arc<TextTokenizer>, skip_special: bool) -> Stream {
        Stream {
            tokenizer,
            skip_special,
            bytes: Vec::new(),
            ids: Vec::new(),
            context: 0,
            from_start: true,
            uncleaned: String::new(),
        }
    }

    pub fn add(&mut self, id: u32) -> Result<String> {
        let Some(token) = self.tokenizer.id_to_token(id) else {
            return Ok(String::new());
        };
        if self.skip_special && self.tokenizer.is_special(&token) {
            return Ok(String::new());
        }
        let text = match self.tokenizer.decoding {
            Decoding::ByteLevel => {
                let spelled: Option<Vec<u8>> = token.chars().map(byte_of).collect();
                self.bytes.extend(spelled.unwrap_or_else(|| token.into_bytes()));
                self.take_characters()
            }
            Decoding::ByteFallback if is_byte_token(&token) => {
                self.ids.push(id);
                String::new()
            }
            _ => {
                self.ids.push(id);
                self.decode_waiting()?
            }
        };
        Ok(self.clean(text, false))
    }

    pub fn finish(&mut self) -> Result<String> {
        let mut text = String::from_utf8_lossy(&std::mem::take(&mut self.bytes)).into_owned();
        if self.ids.len() > self.context {
            text.push_str(&self.decode_waiting()?);
        }
        let text = self.clean(text, true);
        *self = Stream::new(self.tokenizer.clone(), self.skip_special);
        Ok(text)
    }

    /// Everything but a sequence that further bytes could complete.
    fn take_characters(&mut self) -> String {
        let mut end = self.bytes.len();
        let mut text = String::new();
        let mut rest = self.bytes.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    break;
                }
                Err(error) => {
                    let (valid, bad) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    let Some(length) = error.error_len() else {
                        end -= bad.len();
                        break;
                    };
                    text.push('\u{fffd}');
                    rest = &bad[length..];
                }
            }
        }
        self.bytes.drain(..end);
        text
    }

    fn decode_waiting(&mut self) -> Result<String> {
        let shown = if self.context == 0 { String::new() } else { self.tokenizer.decode_raw(&self.ids[..self.context], false)? };
        let all = self.tokenizer.decode_raw(&self.ids, false)?;
        let text = all.strip_prefix(shown.as_str()).unwrap_or_default().to_string();
        // The next context: the last token is enough once its own text shows, because then nothing at the start of a
        // text (a stripped space) is left to happen. Until then everything is kept, which is a few tokens at most.
        let last = self.ids.len() - 1;
        if !self.tokenizer.decode_raw(&self.ids[last..], false)?.is_empty() {
            self.ids.drain(..last);
            self.from_start = false;
        } else if !self.from_start && self.ids.len() > MAX_CONTEXT {
            // Tokens that never show (an empty token again and again) must not fill the window; the one that showed
            // stays in front.
            self.ids.truncate(1);
        } else if self.from_start && self.ids.len() > MAX_CONTEXT && all.is_empty() {
            self.ids.truncate(MAX_CONTEXT);
        }
        self.context = self.ids.len();
        Ok(text)
    }

    /// Applies the cleaning of spaces, if the tokenizer asks for it, to the part that it can no longer change: up to a space
    /// that follows four letters or digits, where none of the replacements reaches across.
    fn clean(&mut self, text: String, all: bool) -> String {
        if !self.tokenizer.cleans_up {
            return text;
        }
        self.uncleaned.push_str(&text);
        let bytes = self.uncleaned.as_bytes();
        let cut = if all {
            bytes.len()
        } else {
            (4..bytes.len())
                .rev()
                .find(|&i| bytes[i] == b' ' && bytes[i - 4..i].iter().all(u8::is_ascii_alphanumeric))
                .unwrap_or(0)
        };
        let rest = self.uncleaned.split_off(cut);
        clean_up(&std::mem::replace(&mut self.uncleaned, rest))
    }
}

const MAX_CONTEXT: usize = 16;
