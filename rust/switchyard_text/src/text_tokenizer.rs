//! The tokenizer: tokenizer.json as the `tokenizers` crate reads it, with what transformers then changes according to
//! tokenizer_config.json (added tokens and their flags, BOS and EOS, no truncation and no padding).

use std::collections::HashMap;
use std::sync::OnceLock;

use serde_json::{Map, Value as Json};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, DecoderWrapper, ModelWrapper, Tokenizer};

use crate::chat::ChatTemplate;
use crate::error::{corrupt, internal, invalid, Result};
use crate::safe::Marker;

/// The names under which tokenizer_config.json lists single special tokens.
const NAMED_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

pub struct TextTokenizer {
    tokenizer: Tokenizer,
    /// The same tokenizer, for which the text of special tokens is ordinary text and the sentinels are added tokens.
    plain: Tokenizer,
    sentinel_ids: [u32; 4],
    break_id: u32,
    /// `plain` without the sentinels, made when a text happens to contain one.
    exact: OnceLock<Tokenizer>,
    pub chat: Option<ChatTemplate>,
    pub special_ids: Vec<u32>,
    /// Texts of the special tokens with their ids, longest first.
    pub special_texts: Vec<(String, u32)>,
    pub bos_id: Option<u32>,
    pub eos_id: Option<u32>,
    /// transformers removes spaces before punctuation after decoding, if asked to and unless the model is a BPE.
    pub cleans_up: bool,
    pub decoding: Decoding,
}

/// Stand-ins for special tokens in a text whose own special tokens must not count; one for each way in which an added token
/// takes up the spaces around it. Noncharacters, which no text should contain.
pub const SENTINELS: [char; 4] = ['\u{fdd1}', '\u{fdd2}', '\u{fdd3}', '\u{fdd4}'];

/// Cuts a text that a model's own vocabulary would turn into a special token (Unigram vocabularies contain "</s>").
pub const BREAK: char = '\u{fdd5}';

/// What a streaming decoder must know about the decoder.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Decoding {
    /// Tokens spell bytes; the text is their lossy UTF-8 reading.
    ByteLevel,
    /// Tokens spell characters, except runs of <0xNN> tokens, which are read as bytes together.
    ByteFallback,
    /// Tokens spell characters.
    Characters,
}

/// A token in a config is a string or an object with "content".
fn token_text(value: &Json) -> Option<&str> {
    value.as_str().or_else(|| value.get("content").and_then(Json::as_str))
}

fn added_token(value: &Json, special_if_text: bool) -> Option<AddedToken> {
    let content = token_text(value)?.to_string();
    let Some(object) = value.as_object() else {
        return Some(AddedToken::from(content, special_if_text));
    };
    let flag = |name: &str| object.get(name).and_then(Json::as_bool);
    let special = flag("special").unwrap_or(special_if_text);
    let mut token = AddedToken::from(content, special);
    token.single_word = flag("single_word").unwrap_or(false);
    token.lstrip = flag("lstrip").unwrap_or(false);
    token.rstrip = flag("rstrip").unwrap_or(false);
    token.normalized = flag("normalized").unwrap_or(!special);
    Some(token)
}

fn same(a: &AddedToken, b: &AddedToken) -> bool {
    a.content == b.content
        && a.special == b.special
        && a.single_word == b.single_word
        && a.lstrip == b.lstrip
        && a.rstrip == b.rstrip
        && a.normalized == b.normalized
}

impl TextTokenizer {
    pub fn new(json: &[u8], config: Option<&[u8]>, template: Option<&str>) -> Result<TextTokenizer> {
        let mut tokenizer =
            Tokenizer::from_bytes(json).map_err(|e| corrupt(format!("tokenizer.json: {e}")))?;
        tokenizer.with_truncation(None).map_err(|e| corrupt(format!("tokenizer.json: {e}")))?;
        tokenizer.with_padding(None);

        let config: Map<String, Json> = match config {
            None => Map::new(),
            Some(bytes) => serde_json::from_slice(bytes)
                .map_err(|e| corrupt(format!("tokenizer_config.json: {e}")))?,
        };
        let named: Map<String, Json> = NAMED_TOKENS
            .iter()
            .filter_map(|name| Some((name.to_string(), config.get(*name).filter(|v| token_text(v).is_some())?.clone())))
            .collect();
        add_config_tokens(&mut tokenizer, &config, &named)?;

        let id_of = |name: &str| named.get(name).and_then(token_text).and_then(|t| tokenizer.token_to_id(t));
        let (bos_id, eos_id) = (id_of("bos_token"), id_of("eos_token"));
        let template_pieces = post_processor(&config, &named);
        if let Some((pattern, tokens)) = template_pieces {
            let tokens = tokens
                .into_iter()
                .map(|text| {
                    let id = tokenizer.token_to_id(&text).ok_or_else(|| {
                        corrupt(format!("tokenizer_config.json: {text:?} is not in the vocabulary of tokenizer.json"))
                    })?;
                    Ok((text, id))
                })
                .collect::<Result<Vec<_>>>()?;
            let processor = TemplateProcessing::builder()
                .try_single(pattern)
                .and_then(|b| b.special_tokens(tokens).build().map_err(|e| e.to_string()))
                .map_err(|e| corrupt(format!("tokenizer_config.json: {e}")))?;
            tokenizer.with_post_processor(Some(processor));
        }

        let mut special_texts: Vec<(String, u32)> = tokenizer
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special && !token.content.is_empty())
            .map(|(id, token)| (token.content, id))
            .collect();
        let mut special_ids: Vec<u32> = special_texts.iter().map(|(_, id)| *id).collect();
        special_ids.sort_unstable();
        special_texts.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then_with(|| a.0.cmp(&b.0)));

        let mut plain = tokenizer.clone();
        plain.set_encode_special_tokens(true);
        let sentinels = SENTINELS.iter().enumerate().map(|(i, c)| {
            AddedToken::from(*c, false).normalized(false).lstrip(i & 1 != 0).rstrip(i & 2 != 0)
        });
        let breaking = AddedToken::from(BREAK, false).normalized(false);
        plain.add_tokens(sentinels.chain([breaking]).collect::<Vec<_>>()).map_err(|e| internal(e.to_string()))?;
        let break_id = plain.token_to_id(&BREAK.to_string()).unwrap_or(u32::MAX);
        let sentinel_ids = SENTINELS.map(|c| plain.token_to_id(&c.to_string()).unwrap_or(u32::MAX));
        let cleans_up = config.get("clean_up_tokenization_spaces").and_then(Json::as_bool).unwrap_or(false)
            && !matches!(tokenizer.get_model(), ModelWrapper::BPE(_));
        let chat = ChatTemplate::new(&config, template, named_texts(&config, &named))?;
        let decoding = decoding_of(tokenizer.get_decoder());
        Ok(TextTokenizer {
            tokenizer,
            plain,
            sentinel_ids,
            break_id,
            exact: OnceLock::new(),
            chat,
            special_ids,
            special_texts,
            bos_id,
            eos_id,
            cleans_up,
            decoding,
        })
    }

    pub fn encode(&self, text: &str, add_special_tokens: bool, parse_special: bool) -> Result<Vec<u32>> {
        let tokenizer = if parse_special {
            &self.tokenizer
        } else if !text.contains(SENTINELS) && !text.contains(BREAK) {
            return self.encode_plain(text, add_special_tokens);
        } else {
            self.exact.get_or_init(|| {
                let mut exact = self.tokenizer.clone();
                exact.set_encode_special_tokens(true);
                exact
            })
        };
        let encoding = tokenizer.encode_fast(text, add_special_tokens).map_err(|e| invalid(format!("encode: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Which sentinel stands for a special token.
    pub fn sentinel_of(&self, id: u32) -> usize {
        let token = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder().get(&id);
        token.map_or(0, |t| usize::from(t.lstrip) | usize::from(t.rstrip) << 1)
    }

    fn encode_plain(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let encode = |text: &str| -> Result<Vec<u32>> {
            let encoding = self.plain.encode_fast(text, add_special_tokens).map_err(|e| invalid(format!("encode: {e}")))?;
            Ok(encoding.get_ids().to_vec())
        };
        let ids = encode(text)?;
        // The model may have made a special token by itself. (Or the post-processor did, or it is the unknown token;
        // then no text of one is found.)
        if ids.iter().any(|id| self.special_ids.binary_search(id).is_ok()) {
            if let Some(broken) = Marker::new(&self.special_texts, BREAK).mark(text) {
                let mut ids = encode(&broken)?;
                ids.retain(|id| *id != self.break_id);
                return Ok(ids);
            }
        }
        Ok(ids)
    }

    /// Encodes a text in which sentinels stand for the special tokens `control`, in order.
    pub fn encode_with_sentinels(&self, text: &str, control: &[u32]) -> Result<Vec<u32>> {
        let mut next = control.iter();
        let ids = self.encode_plain(text, false)?.into_iter().map(|id| {
            if self.sentinel_ids.contains(&id) {
                next.next().copied().ok_or_else(|| internal("a sentinel too many"))
            } else {
                Ok(id)
            }
        });
        let ids = ids.collect::<Result<Vec<u32>>>()?;
        if next.next().is_some() {
            return Err(internal("a sentinel was lost"));
        }
        Ok(ids)
    }

    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let text = self.decode_raw(ids, skip_special)?;
        Ok(if self.cleans_up { clean_up(&text) } else { text })
    }

    pub fn decode_raw(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.tokenizer.decode(ids, skip_special).map_err(|e| internal(format!("decode: {e}")))
    }

    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    pub fn is_special(&self, token: &str) -> bool {
        self.tokenizer.get_added_vocabulary().is_special_token(token)
    }

    pub fn vocab_size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }
}

/// Adds what tokenizer_config.json has and tokenizer.json has not, or has with other flags, in the order of transformers.
fn add_config_tokens(tokenizer: &mut Tokenizer, config: &Map<String, Json>, named: &Map<String, Json>) -> Result<()> {
    let present: HashMap<String, AddedToken> =
        tokenizer.get_added_tokens_decoder().into_values().map(|t| (t.content.clone(), t)).collect();
    let mut adding: Vec<AddedToken> = Vec::new();

    if let Some(listed) = config.get("added_tokens_decoder").and_then(Json::as_object) {
        let mut listed: Vec<(u32, &Json)> =
            listed.iter().filter_map(|(id, token)| Some((id.parse().ok()?, token))).collect();
        listed.sort_by_key(|(id, _)| *id);
        for (_, value) in listed {
            if let Some(token) = added_token(value, false) {
                if !present.get(&token.content).is_some_and(|p| same(p, &token)) {
                    adding.push(token);
                }
            }
        }
    }
    let mut extra: Vec<&Json> = named.values().collect();
    for list in ["additional_special_tokens", "extra_special_tokens"] {
        match config.get(list) {
            Some(Json::Array(tokens)) => extra.extend(tokens),
            Some(Json::Object(tokens)) => extra.extend(tokens.values()),
            _ => {}
        }
    }
    for value in extra {
        if let Some(token) = added_token(value, true) {
            let known = present.contains_key(&token.content) || adding.iter().any(|t| t.content == token.content);
            if !known {
                adding.push(token);
            }
        }
    }
    for token in &mut adding {
        token.special |= named.values().any(|v| token_text(v) == Some(&token.content));
    }
    if !adding.is_empty() {
        tokenizer
            .add_tokens(adding)
            .map_err(|e| corrupt(format!("tokenizer_config.json: added tokens: {e}")))?;
    }
    Ok(())
}

/// The post-processor that add_bos_token and add_eos_token ask for; they replace the one of tokenizer.json.
fn post_processor(config: &Map<String, Json>, named: &Map<String, Json>) -> Option<(String, Vec<String>)> {
    if !config.contains_key("add_bos_token") && !config.contains_key("add_eos_token") {
        return None;
    }
    let wanted = |flag: &str, name: &str| -> Option<String> {
        let on = config.get(flag).and_then(Json::as_bool).unwrap_or(false);
        on.then(|| named.get(name).and_then(token_text).map(str::to_string)).flatten()
    };
    let (bos, eos) = (wanted("add_bos_token", "bos_token"), wanted("add_eos_token", "eos_token"));
    let pattern = [bos.as_deref(), Some("$A"), eos.as_deref()]
        .into_iter()
        .flatten()
        .map(|piece| format!("{piece}:0"))
        .collect::<Vec<_>>()
        .join(" ");
    Some((pattern, bos.into_iter().chain(eos).collect()))
}

/// The names that a chat template finds as variables.
fn named_texts(config: &Map<String, Json>, named: &Map<String, Json>) -> Vec<(String, String)> {
    let mut texts: Vec<(String, String)> =
        named.iter().filter_map(|(name, v)| Some((name.clone(), token_text(v)?.to_string()))).collect();
    if let Some(Json::Object(extra)) = config.get("extra_special_tokens") {
        texts.extend(extra.iter().filter_map(|(name, v)| Some((name.clone(), token_text(v)?.to_string()))));
    }
    texts
}

fn decoding_of(decoder: Option<&DecoderWrapper>) -> Decoding {
    match decoder {
        Some(DecoderWrapper::ByteLevel(_)) => Decoding::ByteLevel,
        Some(DecoderWrapper::ByteFallback(_)) => Decoding::ByteFallback,
        Some(DecoderWrapper::Sequence(sequence)) => {
            let parts = sequence.get_decoders();
            if parts.len() == 1 {
                decoding_of(parts.first())
            } else if parts.iter().any(|d| matches!(d, DecoderWrapper::ByteFallback(_))) {
                Decoding::ByteFallback
            } else {
                Decoding::Characters
            }
        }
        _ => Decoding::Characters,
    }
}

/// The replacements of transformers' clean_up_tokenization, in its order.
pub fn clean_up(text: &str) -> String {
    [
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ]
    .iter()
    .fold(text.to_string(), |text, (from, to)| text.replace(from, to))
}
