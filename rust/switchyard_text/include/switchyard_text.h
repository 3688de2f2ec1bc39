/* C ABI of rust/switchyard_text: tokenizer, chat template and streaming decoder.
 *
 * Texts are UTF-8 with a length, never zero-terminated. Functions that can fail return 0, or a SY_TEXT_* code with a
 * message in *error; *out is written only on success, *error only on failure. What they write must be freed with the
 * matching function. A tokenizer may be used by several threads at once; a stream by one thread at a time. No function
 * unwinds into the caller or prints. This header is for src/text; programs use switchyard/text/tokenizer.h. */
#ifndef SWITCHYARD_TEXT_H_
#define SWITCHYARD_TEXT_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  SY_TEXT_OK = 0,
  SY_TEXT_INVALID_ARGUMENT = 1,   /* the request: bad UTF-8, bad JSON, an error that the template raised */
  SY_TEXT_CORRUPT_DATA = 2,       /* a file of the tokenizer; the message names it */
  SY_TEXT_RESOURCE_EXHAUSTED = 3, /* a limit on chat templates */
  SY_TEXT_INTERNAL = 4
};

typedef struct sy_text_tokenizer sy_text_tokenizer;
typedef struct sy_text_stream sy_text_stream;

typedef struct {
  const char* data; /* may be null if size is 0 */
  size_t size;
} sy_text_view;

typedef struct {
  char* data;
  size_t size;
} sy_text_bytes;

typedef struct {
  uint32_t* data;
  size_t size;
} sy_text_ids;

typedef struct {
  sy_text_view messages; /* JSON array of objects */
  sy_text_view tools;    /* JSON array, or empty */
  sy_text_view kwargs;   /* JSON object with further variables of the template, or empty */
  bool add_generation_prompt;
  bool continue_final_message;
} sy_text_chat;

void sy_text_bytes_free(sy_text_bytes bytes);
void sy_text_ids_free(sy_text_ids ids);

/* Contents of tokenizer.json, and of tokenizer_config.json and chat_template.jinja or null where there is none. */
int32_t sy_text_tokenizer_new(sy_text_view tokenizer_json, const sy_text_view* config_json,
                              const sy_text_view* chat_template, sy_text_tokenizer** out, sy_text_bytes* error);
void sy_text_tokenizer_free(sy_text_tokenizer* tokenizer);

/* Without parse_special, the text of special tokens is encoded as ordinary text. */
int32_t sy_text_encode(const sy_text_tokenizer* tokenizer, sy_text_view text, bool add_special_tokens,
                       bool parse_special, sy_text_ids* out, sy_text_bytes* error);
/* Ids that no token has decode to nothing. */
int32_t sy_text_decode(const sy_text_tokenizer* tokenizer, const uint32_t* ids, size_t size, bool skip_special,
                       sy_text_bytes* out, sy_text_bytes* error);

int32_t sy_text_id_to_token(const sy_text_tokenizer* tokenizer, uint32_t id, sy_text_bytes* out, sy_text_bytes* error);
int64_t sy_text_token_to_id(const sy_text_tokenizer* tokenizer, sy_text_view token); /* -1: no such token */
size_t sy_text_vocab_size(const sy_text_tokenizer* tokenizer);                       /* with added tokens */
int32_t sy_text_special_ids(const sy_text_tokenizer* tokenizer, sy_text_ids* out, sy_text_bytes* error);
int64_t sy_text_bos_id(const sy_text_tokenizer* tokenizer); /* -1: none */
int64_t sy_text_eos_id(const sy_text_tokenizer* tokenizer);

bool sy_text_has_chat_template(const sy_text_tokenizer* tokenizer);
int32_t sy_text_render_chat(const sy_text_tokenizer* tokenizer, const sy_text_chat* chat, sy_text_bytes* out,
                            sy_text_bytes* error);
int32_t sy_text_chat_ids(const sy_text_tokenizer* tokenizer, const sy_text_chat* chat, bool safe, sy_text_ids* out,
                         sy_text_bytes* error);

/* A stream keeps its tokenizer alive. After finish it starts anew. */
sy_text_stream* sy_text_stream_new(const sy_text_tokenizer* tokenizer, bool skip_special);
int32_t sy_text_stream_add(sy_text_stream* stream, uint32_t id, sy_text_bytes* out, sy_text_bytes* error);
int32_t sy_text_stream_finish(sy_text_stream* stream, sy_text_bytes* out, sy_text_bytes* error);
void sy_text_stream_free(sy_text_stream* stream);

#ifdef __cplusplus
}
#endif

#endif /* SWITCHYARD_TEXT_H_ */
