"""Chats: rendering by the model's template; parsing of reasoning and tool calls in the output."""
