// The template engine: a corpus with Jinja2's own results, refusals, and limits.
#include "switchyard/text/chat_template.h"

#include <pthread.h>

#include <ctime>

#include "switchyard/core/error.h"
#include "text/text_cases.h"

namespace switchyard {
namespace {

using testing::OrderedJson;

std::string Render(const std::string& source, const std::string& kwargs = "{}") {
  ChatRequest request;
  request.messages_json = R"([{"role": "user", "content": "hi"}])";
  request.kwargs_json = kwargs;
  return ChatTemplate::Create(source)->Render(request);
}

// The error of compiling or rendering, which must come.
Error Failure(const std::string& source, const std::string& kwargs = "{}") {
  try {
    const std::string text = Render(source, kwargs);
    ADD_FAILURE() << source.substr(0, 200) << " gave " << text.substr(0, 200);
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorCode::kInternal, "no error");
}

// tests/text/data/templates.json: rendered by Jinja2 3.1.6 in the environment of transformers 5.24.
TEST(ChatTemplateCorpus, EqualsJinja2) {
  const auto corpus =
      OrderedJson::parse(testing::ReadText(testing::SourceDir() / "tests/text/data/templates.json").value());
  ASSERT_GE(corpus.at("cases").size(), 50u);
  for (const OrderedJson& test : corpus.at("cases")) {
    SCOPED_TRACE(test.at("name").get<std::string>());
    ChatRequest request;
    request.messages_json = corpus.at("messages").dump();
    request.kwargs_json = corpus.at("variables").dump();
    const auto chat_template = ChatTemplate::Create(test.at("template").get<std::string>());
    if (test.contains("error")) {
      EXPECT_THROW(chat_template->Render(request), Error);
    } else {
      EXPECT_EQ(chat_template->Render(request), test.at("expected").get<std::string>());
    }
  }
}

TEST(ChatTemplate, TimeNow) {
  char expected[64];
  const std::time_t now = std::time(nullptr);
  std::tm fields{};
  localtime_r(&now, &fields);
  std::strftime(expected, sizeof(expected), "%Y-%m", &fields);
  EXPECT_EQ(Render("{{ strftime_now('%Y-%m') }}"), expected);
}

TEST(ChatTemplate, SyntaxErrorsNameTheLine) {
  const std::pair<const char*, const char*> cases[] = {
      {"a\n{{ 1 + }}", "line 2: unexpected '}}'"},
      {"a\n\n{% if x %}b", "'if' of line 3 is not closed"},
      {"{% endfor %}", "line 1: Encountered unknown tag 'endfor'"},
      {"\n{{ x|nofilter }}", "line 2: No filter named 'nofilter'."},
      {"\n\n{{ x is notest }}", "line 3: No test named 'notest'."},
      {"{% include 'x' %}", "line 1: 'include' is not supported"},
      {"{% for x in y %}{% endif %}", "line 1: Encountered unknown tag 'endif' (looking for endfor"},
      {"{{ 'abc }}", "line 1: a string is not closed"},
      {"x{# note", "line 1: Missing end of comment tag"},
  };
  for (const auto& [source, message] : cases) {
    const Error error = Failure(source);
    EXPECT_EQ(error.code(), ErrorCode::kCorruptData) << source;
    EXPECT_NE(error.message().find(message), std::string::npos) << error.message();
    EXPECT_TRUE(error.message().starts_with("chat_template.jinja: ")) << error.message();
  }
}

TEST(ChatTemplate, RuntimeErrors) {
  const std::pair<const char*, const char*> cases[] = {
      {"\n{{ raise_exception('roles must alternate') }}", "roles must alternate"},
      {"\n{{ nope.x }}", "line 2: 'nope' is undefined"},
      {"{{ messages[0].nope.x }}", "'dict object' has no attribute 'nope'"},
      {"{{ 'a' + 1 }}", "can only concatenate str (not \"int\") to str"},
      {"{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."},
      {"{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe."},
      {"{{ 1 / 0 }}", "division by zero"},
      {"{% set ns = namespace() %}{% set ns._x = 1 %}", "underscore"},
  };
  for (const auto& [source, message] : cases) {
    const Error error = Failure(source);
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << source;
    EXPECT_NE(error.message().find(message), std::string::npos) << error.message();
  }
}

// Each of these would take for ever, or all memory, or all stack.
TEST(ChatTemplate, HostileTemplatesStop) {
  const std::string many = "{% for i in range(100000) %}";
  const std::string deep(5000, '(');
  const std::vector<std::string> sources = {
      many + many + "{% endfor %}{% endfor %}",
      "{% set ns = namespace(x='a') %}" + many + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
      "{% set ns = namespace(x='a') %}" + many + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
      "{% set ns = namespace(x=[1]) %}" + many + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
      "{% set ns = namespace(x=[]) %}" + many + "{% set ns.x = [ns.x] %}{% endfor %}",
      "{{ 'a' * 10000000000 }}",
      "{{ '%1000000000d' % 1 }}",
      "{{ 'a'.ljust(10000000000) }}",
      "{{ range(1000000000) }}",
      "{% set s = 'a' * 1000000 %}{{ [s] * 100000 }}",
      "{% set s = 'a' * 1000000 %}" + many + "{% if s.isalpha() %}{% endif %}{% endfor %}",
      "{% set s = 'a' * 1000000 %}" + many + "{% if s.count('b') %}{% endif %}{% endfor %}",
      "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
      "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
      "{{ " + deep + "1 }}",
      "{{ 1" + [] { std::string s; for (int i = 0; i < 50000; ++i) s += " + 1"; return s; }() + " }}",
      [] { std::string s; for (int i = 0; i < 5000; ++i) s += "{% if 1 %}"; return s; }(),
  };
  const auto run = [&sources] {
    for (const std::string& source : sources) {
      const Error error = Failure(source);
      EXPECT_NE(error.code(), ErrorCode::kInternal) << source.substr(0, 100) << ": " << error.message();
    }
  };
  run();
}

// Limits are on the requests' own scale: long conversations are not hostile.
TEST(ChatTemplate, LongConversations) {
  OrderedJson messages = OrderedJson::array();
  for (int i = 0; i < 3000; ++i) {
    messages.push_back({{"role", i % 2 == 0 ? "user" : "assistant"}, {"content", std::string(300, 'x')}});
  }
  ChatRequest request;
  request.messages_json = messages.dump();
  const std::string text =
      ChatTemplate::Create(
          "{% for m in messages %}{% if loop.index0 % 2 == 0 and m.role != 'user' %}{{ raise_exception('order') }}"
          "{% endif %}{{ '<' ~ m.role ~ '>' ~ m.content | trim }}{% endfor %}")
          ->Render(request);
  EXPECT_GT(text.size(), 3000u * 300u);
}

TEST(ChatTemplate, BadRequests) {
  const auto chat_template = ChatTemplate::Create("{{ messages[0].content }}");
  const auto failure = [&](const ChatRequest& request) -> std::string {
    try {
      chat_template->Render(request);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.message();
    }
    return "none";
  };
  const std::string one = R"([{"role": "user", "content": "a"}])";
  EXPECT_NE(failure({.messages_json = "[{"}).find("messages: not valid JSON: "), std::string::npos);
  EXPECT_EQ(failure({.messages_json = "[]"}), "messages: expected at least one message");
  EXPECT_EQ(failure({.messages_json = "{}"}), "messages: expected an array of objects");
  EXPECT_EQ(failure({.messages_json = "[1]"}), "messages[0]: expected an object");
  EXPECT_EQ(failure({.messages_json = one, .tools_json = "[3]"}), "tools[0]: expected an object");
  EXPECT_EQ(failure({.messages_json = one, .kwargs_json = "[]"}), "template arguments: expected an object");
  EXPECT_NE(failure({.messages_json = one, .kwargs_json = R"({"messages": 1})"}).find("its own field"),
            std::string::npos);
  EXPECT_NE(failure({.messages_json = std::string("[\"\xff\"]")}).find("messages: invalid UTF-8 at byte 2"),
            std::string::npos);
  EXPECT_NE(failure({.messages_json = one, .add_generation_prompt = true, .continue_final_message = "content"})
                .find("exclude each other"),
            std::string::npos);
  EXPECT_NE(failure({.messages_json = one, .continue_final_message = "text"}).find("no \"text\" to continue"),
            std::string::npos);
  EXPECT_NE(failure({.messages_json = std::string(100000, '[')}).find("not valid JSON"), std::string::npos);
}

TEST(ChatTemplate, MessagesAreNormalized) {
  const auto render = [](const std::string& source, const std::string& messages) {
    return ChatTemplate::Create(source)->Render({.messages_json = messages});
  };
  EXPECT_EQ(render("{{ messages[0].content is defined }}", R"([{"role": "assistant", "content": null}])"), "False");
  EXPECT_EQ(render("{{ messages[0].thinking }}", R"([{"role": "assistant", "reasoning_content": "r"}])"), "r");
  EXPECT_EQ(render("{{ messages[0].reasoning_content }}", R"([{"role": "assistant", "thinking": "t"}])"), "t");
  EXPECT_EQ(render("{% for p in messages[0].content %}{{ p.type }}{{ p.text }};{% endfor %}",
                   R"([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])"),
            "texta;textb;");
  EXPECT_EQ(render("{{ messages[0] }}", "[{\"role\": \"user\", \"content\": \"a\\u0000b\"}]"),
            R"({'role': 'user', 'content': 'a\x00b'})");
}

TEST(ChatTemplate, ContinueFinalMessage) {
  const std::string messages = R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": "so far  "}])";
  const ChatRequest request{.messages_json = messages, .continue_final_message = "content"};
  const std::string keep = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}";
  const std::string trim = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}";
  EXPECT_EQ(ChatTemplate::Create(keep)->Render(request), "<user>q<end><assistant>so far  ");
  EXPECT_EQ(ChatTemplate::Create(trim)->Render(request), "<user>q<end><assistant>so far");
}

TEST(ChatTemplate, WorksOnASmallStack) {
  // 512 KiB, as some runtimes give their threads.
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 512 * 1024), 0);
  pthread_t thread;
  ASSERT_EQ(pthread_create(
                &thread, &attributes,
                [](void*) -> void* {
                  EXPECT_EQ(Failure("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").code(),
                            ErrorCode::kResourceExhausted);
                  EXPECT_EQ(Failure("{{ " + std::string(100000, '[') + " }}").code(), ErrorCode::kCorruptData);
                  return nullptr;
                },
                nullptr),
            0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

}  // namespace
}  // namespace switchyard
