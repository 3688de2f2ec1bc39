//! The text layer's Rust half behind the C ABI of include/switchyard_text.h: opaque handles, UTF-8 buffers with lengths,
//! an explicit free for everything returned, and no unwinding into the caller.

mod chat;
mod error;
mod limits;
mod python;
mod safe;
mod stream;
mod text_tokenizer;

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;

use chat::ChatRequest;
use error::{invalid, Kind, Result, TextError};
use stream::Stream;
use text_tokenizer::TextTokenizer;

/// An array of `size` bytes that sy_text_bytes_free frees.
#[repr(C)]
pub struct SyTextBytes {
    data: *mut u8,
    size: usize,
}

/// An array of `size` ids that sy_text_ids_free frees.
#[repr(C)]
pub struct SyTextIds {
    data: *mut u32,
    size: usize,
}

/// Text of the caller; `data` may be null if `size` is 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SyTextView {
    data: *const u8,
    size: usize,
}

#[repr(C)]
pub struct SyTextChat {
    messages: SyTextView,
    tools: SyTextView,
    kwargs: SyTextView,
    add_generation_prompt: bool,
    continue_final_message: bool,
}

pub struct SyTextTokenizer(Arc<TextTokenizer>);
pub struct SyTextStream(Stream);

fn give_bytes(out: *mut SyTextBytes, bytes: Vec<u8>) {
    let size = bytes.len();
    let data = Box::into_raw(bytes.into_boxed_slice()).cast::<u8>();
    // SAFETY: the header requires a valid pointer.
    unsafe { out.write(SyTextBytes { data, size }) };
}

fn give_ids(out: *mut SyTextIds, ids: Vec<u32>) {
    let size = ids.len();
    let data = Box::into_raw(ids.into_boxed_slice()).cast::<u32>();
    // SAFETY: the header requires a valid pointer.
    unsafe { out.write(SyTextIds { data, size }) };
}

/// SAFETY: a handle that is not yet freed; so for the other two.
unsafe fn shared<'a>(tokenizer: *const SyTextTokenizer) -> &'a Arc<TextTokenizer> {
    &(&*tokenizer).0
}

unsafe fn of<'a>(tokenizer: *const SyTextTokenizer) -> &'a TextTokenizer {
    shared(tokenizer)
}

unsafe fn stream_of<'a>(stream: *mut SyTextStream) -> &'a mut Stream {
    &mut (&mut *stream).0
}

/// SAFETY: the view must be valid for as long as the result is used.
unsafe fn bytes_of<'a>(view: SyTextView) -> &'a [u8] {
    if view.size == 0 {
        return &[];
    }
    std::slice::from_raw_parts(view.data, view.size)
}

/// SAFETY: as bytes_of.
unsafe fn text_of<'a>(view: SyTextView, what: &str) -> Result<&'a str> {
    std::str::from_utf8(bytes_of(view))
        .map_err(|e| invalid(format!("{what}: invalid UTF-8 at byte {}", e.valid_up_to())))
}

/// SAFETY: as bytes_of.
unsafe fn request_of<'a>(chat: *const SyTextChat) -> Result<ChatRequest<'a>> {
    let chat = &*chat;
    Ok(ChatRequest {
        messages: text_of(chat.messages, "messages")?,
        tools: text_of(chat.tools, "tools")?,
        kwargs: text_of(chat.kwargs, "template arguments")?,
        add_generation_prompt: chat.add_generation_prompt,
        continue_final_message: chat.continue_final_message,
    })
}

/// Runs `work`; 0, or the kind of the error with its message in `error`. A panic is an error of ours, not of the process.
fn guarded(error: *mut SyTextBytes, work: impl FnOnce() -> Result<()>) -> i32 {
    let failure = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return 0,
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()))
                .unwrap_or_default();
            TextError { kind: Kind::Internal, message: format!("the text library panicked: {text}") }
        }
    };
    give_bytes(error, failure.message.into_bytes());
    failure.kind as i32
}

/// # Safety
/// See the header; so for all functions below.
#[no_mangle]
pub unsafe extern "C" fn sy_text_tokenizer_new(
    tokenizer_json: SyTextView,
    config_json: *const SyTextView,
    chat_template: *const SyTextView,
    out: *mut *mut SyTextTokenizer,
    error: *mut SyTextBytes,
) -> i32 {
    guarded(error, || {
        // A panic's message would go to standard error, and the library never prints.
        static QUIET: std::sync::Once = std::sync::Once::new();
        QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
        let config = config_json.as_ref().map(|view| bytes_of(*view));
        let template = match chat_template.as_ref() {
            None => None,
            Some(view) => Some(text_of(*view, "chat_template.jinja")?),
        };
        let tokenizer = TextTokenizer::new(bytes_of(tokenizer_json), config, template)?;
        out.write(Box::into_raw(Box::new(SyTextTokenizer(Arc::new(tokenizer)))));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_tokenizer_free(tokenizer: *mut SyTextTokenizer) {
    if !tokenizer.is_null() {
        let _ = catch_unwind(AssertUnwindSafe(|| drop(Box::from_raw(tokenizer))));
    }
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_encode(
    tokenizer: *const SyTextTokenizer,
    text: SyTextView,
    add_special_tokens: bool,
    parse_special: bool,
    out: *mut SyTextIds,
    error: *mut SyTextBytes,
) -> i32 {
    guarded(error, || {
        give_ids(out, of(tokenizer).encode(text_of(text, "text")?, add_special_tokens, parse_special)?);
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_decode(
    tokenizer: *const SyTextTokenizer,
    ids: *const u32,
    size: usize,
    skip_special: bool,
    out: *mut SyTextBytes,
    error: *mut SyTextBytes,
) -> i32 {
    guarded(error, || {
        let ids = if size == 0 { &[] } else { std::slice::from_raw_parts(ids, size) };
        give_bytes(out, of(tokenizer).decode(ids, skip_special)?.into_bytes());
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_id_to_token(
    tokenizer: *const SyTextTokenizer,
    id: u32,
    out: *mut SyTextBytes,
    error: *mut SyTextBytes,
) -> i32 {
    guarded(error, || {
        let token = of(tokenizer).id_to_token(id).ok_or_else(|| invalid(format!("there is no token with the id {id}")))?;
        give_bytes(out, token.into_bytes());
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_token_to_id(tokenizer: *const SyTextTokenizer, token: SyTextView) -> i64 {
    let find = || text_of(token, "token").ok().and_then(|token| of(tokenizer).token_to_id(token));
    catch_unwind(AssertUnwindSafe(find)).ok().flatten().map_or(-1, i64::from)
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_vocab_size(tokenizer: *const SyTextTokenizer) -> usize {
    catch_unwind(AssertUnwindSafe(|| of(tokenizer).vocab_size())).unwrap_or(0)
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_special_ids(
    tokenizer: *const SyTextTokenizer,
    out: *mut SyTextIds,
    error: *mut SyTextBytes,
) -> i32 {
    guarded(error, || {
        give_ids(out, of(tokenizer).special_ids.clone());
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_bos_id(tokenizer: *const SyTextTokenizer) -> i64 {
    of(tokenizer).bos_id.map_or(-1, i64::from)
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_eos_id(tokenizer: *const SyTextTokenizer) -> i64 {
    of(tokenizer).eos_id.map_or(-1, i64::from)
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_has_chat_template(tokenizer: *const SyTextTokenizer) -> bool {
    of(tokenizer).chat.is_some()
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_render_chat(
    tokenizer: *const SyTextTokenizer,
    chat: *const SyTextChat,
    out: *mut SyTextBytes,
    error: *mut SyTextBytes,
) -> i32 {
    guarded(error, || {
        let template =
            of(tokenizer).chat.as_ref().ok_or_else(|| invalid("this tokenizer has no chat template"))?;
        give_bytes(out, template.render(&request_of(chat)?, None)?.into_bytes());
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_chat_ids(
    tokenizer: *const SyTextTokenizer,
    chat: *const SyTextChat,
    safe: bool,
    out: *mut SyTextIds,
    error: *mut SyTextBytes,
) -> i32 {
    guarded(error, || {
        give_ids(out, safe::chat_ids(of(tokenizer), &request_of(chat)?, safe)?);
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_stream_new(tokenizer: *const SyTextTokenizer, skip_special: bool) -> *mut SyTextStream {
    Box::into_raw(Box::new(SyTextStream(Stream::new(shared(tokenizer).clone(), skip_special))))
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_stream_add(
    stream: *mut SyTextStream,
    id: u32,
    out: *mut SyTextBytes,
    error: *mut SyTextBytes,
) -> i32 {
    guarded(error, || {
        give_bytes(out, stream_of(stream).add(id)?.into_bytes());
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_stream_finish(
    stream: *mut SyTextStream,
    out: *mut SyTextBytes,
    error: *mut SyTextBytes,
) -> i32 {
    guarded(error, || {
        give_bytes(out, stream_of(stream).finish()?.into_bytes());
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_stream_free(stream: *mut SyTextStream) {
    if !stream.is_null() {
        let _ = catch_unwind(AssertUnwindSafe(|| drop(Box::from_raw(stream))));
    }
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_bytes_free(bytes: SyTextBytes) {
    if !bytes.data.is_null() {
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(bytes.data, bytes.size)));
    }
}

#[no_mangle]
pub unsafe extern "C" fn sy_text_ids_free(ids: SyTextIds) {
    if !ids.data.is_null() {
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(ids.data, ids.size)));
    }
}
