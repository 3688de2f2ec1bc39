// Every recorded chat: rendered text, ids, and refusals.
#include "switchyard/core/error.h"
#include "text/text_cases.h"

namespace switchyard {
namespace {

using testing::OrderedJson;
using Ids = std::vector<int32_t>;

class ChatGolden : public testing::TextCaseTest {};

TEST_P(ChatGolden, RenderAndEncode) {
  const OrderedJson expected = GetParam().Expected("expected_chat.json");
  const auto tokenizer = GetParam().Load();
  ASSERT_TRUE(tokenizer->HasChatTemplate());
  int errors = 0;
  for (const OrderedJson& test : expected.at("cases")) {
    SCOPED_TRACE(test.at("conversation").get<std::string>() + " " + test.at("kwargs").dump().substr(0, 200));
    const ChatRequest request = testing::ToRequest(test);
    if (test.contains("error")) {
      ++errors;
      try {
        tokenizer->RenderChat(request);
        ADD_FAILURE() << "expected: " << test.at("error");
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
        // What raise_exception says is the template's own text; other messages are Python's.
        const std::string raised = "TemplateError: ";
        const std::string message = test.at("error");
        if (message.starts_with(raised)) {
          EXPECT_NE(error.message().find(message.substr(raised.size())), std::string::npos) << error.message();
        }
      }
      continue;
    }
    EXPECT_EQ(tokenizer->RenderChat(request), test.at("rendered").get<std::string>());
    if (test.contains("ids")) {
      EXPECT_EQ(tokenizer->ChatIds(request, ChatSafety::kPlain), test.at("ids").get<Ids>());
      // Without control tokens in user text, the safe mode changes nothing.
      if (test.at("conversation") != "special_tokens_in_text") {
        EXPECT_EQ(tokenizer->ChatIds(request, ChatSafety::kSafe), test.at("ids").get<Ids>());
      }
    }
  }
  RecordProperty("cases", static_cast<int>(expected.at("cases").size()));
  RecordProperty("errors", errors);
}

INSTANTIATE_TEST_SUITE_P(All, ChatGolden, ::testing::ValuesIn(testing::ChatCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace switchyard
