// The page of `inspect --routing`: complete by itself, and everything on it that it promises.
#include <gtest/gtest.h>

#include "routing_stats.h"

namespace switchyard::cli {
namespace {

// How often `word` stands in `text`.
size_t Count(const std::string& text, const std::string& word) {
  size_t count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

// Layers 1 and 3 of four experts, 100 tokens, one expert each: an even share is 25.
RoutingStats Small() {
  RoutingStats stats;
  stats.model = "a <b> & \"c\"";
  stats.text = "text.txt";
  stats.num_tokens = 100;
  stats.num_experts = 4;
  stats.top_k = 1;
  stats.layers = {{1, {25, 25, 50, 0}, 2, 3, {3}, 0.5}, {3, {10, 30, 30, 30}, 1, 0, {}, 0.83}};
  stats.balancedness = 0.665;
  return stats;
}

TEST(RoutingStats, LoadIsRelativeToAnEvenShare) {
  const RoutingStats stats = Small();
  EXPECT_EQ(stats.EvenShare(), 25);
  EXPECT_EQ(stats.Load(stats.layers[0], 2), 2);
}

TEST(RoutingStats, HottestAndIdleOfAllLayers) {
  const RoutingStats stats = Small();
  const std::vector<ExpertPlace> hottest = HottestExperts(stats, 2);
  ASSERT_EQ(hottest.size(), 2u);
  EXPECT_EQ(hottest[0].layer, 0u);
  EXPECT_EQ(hottest[0].expert, 2u);
  EXPECT_EQ(hottest[1].layer, 1u);
  EXPECT_EQ(hottest[1].expert, 1u);
  EXPECT_EQ(HottestExperts(stats, 100).size(), 8u);
  const std::vector<ExpertPlace> idle = IdleExperts(stats);
  ASSERT_EQ(idle.size(), 1u);
  EXPECT_EQ(idle[0].expert, 3u);
  EXPECT_EQ(ListOf({1, 2, 3}, 5), "1, 2, 3");
  EXPECT_EQ(ListOf({1, 2, 3}, 2), "1, 2 and 1 more");
}

TEST(RoutingPage, StandsAlone) {
  const std::string page = RoutingPage(Small());
  EXPECT_TRUE(page.starts_with("<!DOCTYPE html>"));
  for (const char* outside : {"http", "src=", "href=", "url(", "@import", "<script"}) {
    EXPECT_EQ(Count(page, outside), 0u) << outside;
  }
  EXPECT_EQ(Count(page, "prefers-color-scheme:dark"), 1u);
  for (const char* tag : {"g", "svg", "rect", "text", "table", "div", "p", "span", "title"}) {
    EXPECT_EQ(Count(page, std::string("<") + tag + ">") + Count(page, std::string("<") + tag + " "),
              Count(page, std::string("</") + tag + ">") +
                  (std::string(tag) == "rect" ? Count(page, "/>") : 0))
        << tag;
  }
}

TEST(RoutingPage, ShowsEveryExpertAndTheFigures) {
  const std::string page = RoutingPage(Small());
  EXPECT_EQ(Count(page, "<title>layer "), 8u);
  EXPECT_NE(page.find("layer 1, expert 2: 50 tokens, 2.00\u00d7"), std::string::npos);
  EXPECT_EQ(Count(page, "<rect class=\"z\""), 2u);    // the idle expert and the legend
  EXPECT_EQ(Count(page, "<rect class=\"s8\""), 2u);   // twice the share, and the legend
  EXPECT_EQ(Count(page, "<rect class=\"s12\""), 1u);  // the legend only
  for (const char* text :
       {"100 tokens of text.txt", "2 MoE layers", "4 experts each", "1 per token", "0.67",
        "hottest: expert 2 of layer 1", "of 8 experts idle",
        "<h2>Idle experts</h2>\n<p>layer 1, expert 3</p>"}) {
    EXPECT_NE(page.find(text), std::string::npos) << text;
  }
}

TEST(RoutingPage, EscapesNames) {
  const std::string page = RoutingPage(Small());
  EXPECT_EQ(page.find("<b> &"), std::string::npos);
  EXPECT_NE(page.find("a &lt;b&gt; &amp; &quot;c&quot;"), std::string::npos);
}

TEST(RoutingPage, AModelOfManyLayersAndExperts) {
  RoutingStats stats;
  stats.model = "large";
  stats.num_tokens = 1000;
  stats.num_experts = 384;
  stats.top_k = 8;
  for (size_t layer = 0; layer < 94; ++layer) {
    LayerRouting routing;
    routing.layer = layer;
    for (size_t e = 0; e < 384; ++e) {
      routing.tokens.push_back(static_cast<double>((e * 7 + layer * 13) % 50));
      if (routing.tokens.back() == 0) routing.idle.push_back(e);
    }
    stats.layers.push_back(routing);
  }
  const std::string page = RoutingPage(stats);
  EXPECT_EQ(Count(page, "<title>layer "), 384u * 94);
  EXPECT_LT(page.size(), 8u << 20);
  EXPECT_NE(page.find("; and "), std::string::npos);
}

}  // namespace
}  // namespace switchyard::cli
